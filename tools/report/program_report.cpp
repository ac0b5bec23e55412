#include "tools/report/program_report.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "tools/report/json_parts.hpp"
#include "tools/report/program_page.hpp"
#include "tools/report/summary.hpp"

namespace ferry::report {
namespace {

using Json = nlohmann::ordered_json;

double median_of(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Json times_of(const ProgramRuns& runs) {
  Json all = Json::array();
  for (const double us : runs.times_us) all.push_back(to_nanosecond(us));
  return {{"median_us", to_nanosecond(median_of(runs.times_us))},
          {"min_us", to_nanosecond(std::ranges::min(runs.times_us))},
          {"max_us", to_nanosecond(std::ranges::max(runs.times_us))},
          {"runs_us", all}};
}

Json timeline_of(const ProgramRuns& runs, int ranks) {
  Json all = Json::array();
  for (int rank = 0; rank < ranks; ++rank) {
    Json steps = Json::array();
    for (std::size_t step = 0; step < runs.program.steps.size(); ++step) {
      const Span span = runs.span_of(rank, step);
      steps.push_back({to_nanosecond(span.begin_us), to_nanosecond(span.end_us)});
    }
    all.push_back(steps);
  }
  return all;
}

Json json_of(const ProgramRuns& runs, const ProgramReport& run) {
  Json steps = Json::array();
  for (const ProgramStep& step : runs.program.steps)
    steps.push_back({{"name", step.name()},
                     {"kind", to_string(step.kind)},
                     {"lane", step.lane},
                     {"micro_batch", &runs == &run.plain ? 0 : run.batch_of(step)}});
  return {{"text", to_string(runs.program)},
          {"steps", steps},
          {"times", times_of(runs)},
          {"timeline_us", timeline_of(runs, run.configuration.ranks)}};
}

Json thread_name(int rank, int thread, const std::string& name) {
  return {{"ph", "M"}, {"pid", rank}, {"tid", thread}, {"name", "thread_name"}, {"args", {{"name", name}}}};
}

Json step_event(int rank, int thread, const ProgramStep& step, const Span& span) {
  return {{"ph", "X"},
          {"pid", rank},
          {"tid", thread},
          {"ts", to_nanosecond(span.begin_us)},
          {"dur", to_nanosecond(span.length_us())},
          {"name", step.name()}};
}

}  // namespace

Span ProgramRuns::span_of(int rank, std::size_t step) const {
  const double* const begins = begin_us.data() + static_cast<std::size_t>(rank) * (program.steps.size() + 1);
  std::size_t next = step + 1;
  while (on_streams && next < program.steps.size() &&
         program.steps[next].stream != program.steps[step].stream)
    ++next;
  return {begins[step], begins[next]};
}

int ProgramReport::batch_of(const ProgramStep& step) const {
  int streams = 1;
  for (const ProgramStep& one : plain.program.steps) streams = std::max(streams, one.stream + 1);
  return micro_batches > 1 ? step.stream / streams : 0;
}

nlohmann::ordered_json to_json(const ProgramReport& run) {
  const double plain = median_of(run.plain.times_us);
  return {{"schema", kProgramSchemaName},
          {"schema_version", kProgramSchemaVersion},
          {"ferry_version", run.ferry_version},
          {"command", run.command},
          {"started_at", run.started_at},
          {"workload", json_of(run.workload)},
          {"configuration", json_of(run.configuration)},
          {"machine", json_of(run.machine)},
          {"checks", json_of(run.checks)},
          {"program", run.plain.program.name},
          {"micro_batches", run.micro_batches},
          {"batched_to_plain", plain > 0 ? Json(median_of(run.batched.times_us) / plain) : Json(nullptr)},
          {"plain", json_of(run.plain, run)},
          {"batched", json_of(run.batched, run)}};
}

std::string to_html(const ProgramReport& run) {
  return program_page(run, for_script(to_json(run).dump()));
}

std::string to_trace_events(const ProgramReport& run) {
  Json events = Json::array();
  for (int rank = 0; rank < run.configuration.ranks; ++rank) {
    events.push_back({{"ph", "M"},
                      {"pid", rank},
                      {"tid", 0},
                      {"name", "process_name"},
                      {"args", {{"name", fmt::format("rank {}", rank)}}}});
    events.push_back(thread_name(rank, 0, "plain program"));
    for (int batch = 0; batch < run.micro_batches; ++batch)
      events.push_back(thread_name(
          rank, 1 + batch,
          run.micro_batches == 1 ? std::string("a second time") : fmt::format("micro-batch {}", batch)));
    const auto add = [&](const ProgramRuns& runs, auto thread_of) {
      for (std::size_t i = 0; i < runs.program.steps.size(); ++i) {
        const ProgramStep& step = runs.program.steps[i];
        events.push_back(step_event(rank, thread_of(step), step, runs.span_of(rank, i)));
      }
    };
    add(run.plain, [](const ProgramStep&) { return 0; });
    add(run.batched, [&](const ProgramStep& step) { return 1 + run.batch_of(step); });
  }
  return Json{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n";
}

}  // namespace ferry::report
