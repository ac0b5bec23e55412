#include "tools/report/forms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>

#include "tools/report/parts.hpp"

namespace ferry::report {

namespace {

using Buffer = fmt::memory_buffer;

// Writes a comma before every event but the first.
void separate(Buffer& out, bool& first) {
  out.append(std::string_view(first ? "\n" : ",\n"));
  first = false;
}

void add_names(Buffer& out, bool& first, int rank) {
  separate(out, first);
  fmt::format_to(std::back_inserter(out),
                 R"({{"ph":"M","pid":{},"tid":0,"name":"process_name","args":{{"name":"rank {}"}}}})", rank,
                 rank);
  separate(out, first);
  fmt::format_to(std::back_inserter(out),
                 R"({{"ph":"M","pid":{},"tid":0,"name":"process_sort_index","args":{{"sort_index":{}}}}})",
                 rank, rank);
  for (const StepStage stage : kStages) {
    separate(out, first);
    fmt::format_to(std::back_inserter(out),
                   R"({{"ph":"M","pid":{},"tid":{},"name":"thread_name","args":{{"name":"{}"}}}})", rank,
                   static_cast<int>(stage), to_string(stage));
  }
}

void add_spans(Buffer& out, bool& first, int rank, int step, const StepTimes& times) {
  for (const StepStage stage : kStages) {
    const Span& span = times[stage];
    separate(out, first);
    fmt::format_to(
        std::back_inserter(out),
        R"({{"ph":"X","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"name":"{}","args":{{"step":{}}}}})", rank,
        static_cast<int>(stage), span.begin_us, span.length_us(), to_string(stage), step);
  }
}

}  // namespace

std::string to_trace_events(const RunReport& run) {
  validate(run);
  Buffer out;
  bool first = true;
  fmt::format_to(std::back_inserter(out), R"({{"displayTimeUnit":"ms","traceEvents":[)");
  for (int rank = 0; rank < run.configuration.ranks; ++rank) add_names(out, first, rank);
  for (int step = 0; step < run.workload.steps; ++step) {
    for (int rank = 0; rank < run.configuration.ranks; ++rank)
      add_spans(out, first, rank, step, run.at(step, rank));
  }
  fmt::format_to(std::back_inserter(out), "\n]}}\n");
  return fmt::to_string(out);
}

namespace {

// Each is three rectangles; more would make the page slow to open on a phone.
constexpr int kMostRankSteps = 2048;

int most_steps(int ranks) {
  return std::max(1, kMostRankSteps / std::max(1, ranks));
}

void put(std::string& page, std::string_view mark, std::string_view text) {
  page.replace(page.find(mark), mark.size(), text);
}

}  // namespace

// Escapes "<", which could end the script element. In JSON it occurs only in strings, where \u003c means the
// same.
std::string for_script(std::string json) {
  for (std::size_t at = 0; (at = json.find('<', at)) != std::string::npos;) json.replace(at, 1, "\\u003c");
  return json;
}

std::string to_html(const RunReport& run) {
  const nlohmann::ordered_json json = to_json(run, most_steps(run.configuration.ranks));
  std::string page(kPageHtml);
  put(page, "{{css}}", kPageCss);
  put(page, "{{js}}", kPageJs);
  // Last, because its text may contain the other marks.
  put(page, "{{json}}", for_script(json.dump()));
  return page;
}

}  // namespace ferry::report
