#include "tools/report/timeline.hpp"

#include <fmt/format.h>

#include <iterator>
#include <string_view>

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

}  // namespace ferry::report
