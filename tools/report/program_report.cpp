#include "tools/report/program_report.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "tools/report/parts.hpp"
#include "tools/report/summary.hpp"
#include "tools/report/units.hpp"

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

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

const char* colour_of(StepKind kind) {
  switch (kind) {
    case StepKind::dispatch:
    case StepKind::dispatch_send:
    case StepKind::dispatch_receive:
    case StepKind::all_gather_v:
      return "var(--dispatch)";
    case StepKind::combine:
    case StepKind::combine_send:
    case StepKind::combine_receive:
    case StepKind::reduce_scatter_v:
      return "var(--combine)";
    default:
      return "var(--experts)";
  }
}

// A row for each rank and micro-batch; every step is a box whose tooltip names it.
class ProgramTimeline {
 public:
  ProgramTimeline(const ProgramReport& run, const ProgramRuns& runs, int rows_of_rank)
      : run_(run), runs_(runs), rows_of_rank_(rows_of_rank) {
    begin_ = std::ranges::min(runs.begin_us);
    length_ = std::max(std::ranges::max(runs.begin_us) - begin_, 1e-3);
  }

  std::string draw() const {
    const int rows = run_.configuration.ranks * rows_of_rank_;
    std::string out = fmt::format(
        "<svg viewBox=\"0 0 {} {}\" width=\"100%\" font-size=\"11\" fill=\"currentColor\" role=\"img\">\n",
        kLeft + kWidth, rows * kRow);
    for (int rank = 0; rank < run_.configuration.ranks; ++rank) {
      for (int row = 0; row < rows_of_rank_; ++row)
        out += fmt::format(
            "<text x=\"0\" y=\"{}\">{}</text>\n", y_of(rank, row) + kRow - 6,
            rows_of_rank_ == 1 ? fmt::format("rank {}", rank) : fmt::format("rank {}, batch {}", rank, row));
      for (std::size_t i = 0; i < runs_.program.steps.size(); ++i) out += box(rank, i);
    }
    return out + "</svg>\n";
  }

 private:
  static constexpr int kLeft = 110, kWidth = 900, kRow = 18;

  int y_of(int rank, int row) const { return (rank * rows_of_rank_ + row) * kRow; }
  double x_of(double us) const { return kLeft + (us - begin_) / length_ * kWidth; }

  std::string box(int rank, std::size_t number) const {
    const ProgramStep& step = runs_.program.steps[number];
    const Span span = runs_.span_of(rank, number);
    const int row = rows_of_rank_ == 1 ? 0 : run_.batch_of(step);
    return fmt::format(
        "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\"><title>{}: "
        "{}</title></rect>\n",
        x_of(span.begin_us), y_of(rank, row) + 2, std::max(x_of(span.end_us) - x_of(span.begin_us), 0.4),
        kRow - 4, colour_of(step.kind), escaped(step.name()), in_time(span.length_us()));
  }

  const ProgramReport& run_;
  const ProgramRuns& runs_;
  int rows_of_rank_;
  double begin_ = 0, length_ = 1;
};

std::string row_of(const std::string& name, const std::string& value) {
  return fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escaped(name), escaped(value));
}

std::string times_row(const std::string& name, const ProgramRuns& runs) {
  std::vector<double> sorted = runs.times_us;
  std::ranges::sort(sorted);
  return row_of(name, fmt::format("median {}, {} to {}", in_time(sorted[sorted.size() / 2]),
                                  in_time(sorted.front()), in_time(sorted.back())));
}

std::string section(const std::string& title, const std::string& body) {
  return fmt::format("<h2>{}</h2>\n{}", escaped(title), body);
}

std::string program_section(const std::string& title, const ProgramReport& run, const ProgramRuns& runs,
                            int rows_of_rank) {
  return section(title,
                 ProgramTimeline(run, runs, rows_of_rank).draw() +
                     fmt::format("<details><summary>Text and drawing</summary><pre>{}</pre>{}</details>\n",
                                 escaped(to_string(runs.program)), to_svg(runs.program)));
}

// The HTML page of a run of programs. `json`: the run's JSON, as text that may stand in a script element.
std::string program_page(const ProgramReport& run, const std::string& json) {
  std::string checks, facts;
  for (const Check& check : run.checks)
    checks +=
        row_of(check.name, check.passed ? fmt::format("{} values, all equal", with_thousands(check.compared))
                                        : fmt::format("{} of {} wrong, {}", with_thousands(check.wrong),
                                                      with_thousands(check.compared), check.detail));
  facts += row_of("trace", run.workload.trace);
  facts += row_of("backend", fmt::format("{}, {} of {}", run.configuration.backend,
                                         counted(run.configuration.ranks, "rank"), run.configuration.group));
  facts += row_of("tokens per rank", with_thousands(run.workload.tokens_per_rank));
  facts += row_of("layer",
                  fmt::format("{} experts, top-{}, {} columns, {}", run.configuration.experts,
                              run.configuration.top_k, run.configuration.hidden, run.configuration.format));
  facts += row_of("experts", run.configuration.expert_function);
  facts += row_of("machine", fmt::format("{}, {} cores", run.machine.cpu, run.machine.cores));
  facts += row_of("command", run.command);
  const std::string name = escaped(run.plain.program.name);
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Program "
      "{}</title>\n<style>",
      name);
  page += kPageCss;
  page +=
      "h2 { margin: 28px 0 8px; } td { padding: 2px 16px 2px 0; vertical-align: top; } pre { overflow-x: "
      "auto; }\n";
  page += fmt::format("</style></head><body>\n<h1>Program {}</h1>\n<p class=\"muted\">{}</p>\n", name,
                      escaped(run.started_at));
  page += section("Checks", "<table>" + checks + "</table>\n");
  page += section("Times of the slowest rank", "<table>" + times_row("plain program", run.plain) +
                                                   times_row(run.second_name(), run.batched) + "</table>\n");
  page += program_section("Plain program, last run", run, run.plain, 1);
  page += program_section(
      run.second_name() +
          (run.micro_batches > 1 ? ", last run: a row for each rank and micro-batch" : ", last run"),
      run, run.batched, run.micro_batches);
  page += section("Run", "<table>" + facts + "</table>\n");
  page += "<script type=\"application/json\" id=\"run\">" + json + "</script>\n</body></html>\n";
  return page;
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

std::string ProgramReport::second_name() const {
  return micro_batches > 1 ? fmt::format("{} micro-batches", micro_batches) : "a second time";
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
