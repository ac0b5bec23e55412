#include "tools/ferry/bench/readme.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "ferry/error.hpp"
#include "tools/ferry/bench/report.hpp"
#include "tools/ferry/bench/runners.hpp"
#include "tools/ferry/bench/sweep.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

// ---- measuring

// Figures with the same options are measured in one run.
BenchOptions options_of(const ReadmeFigure& figure, int repetitions) {
  BenchOptions options;
  options.traces = {figure.router};
  options.tokens = std::to_string(figure.tokens);
  options.ranks = {figure.ranks};
  options.backend = figure.on_gpus() ? "cuda" : "cpu";
  options.formats = {figure.format};
  options.hidden = figure.hidden;
  options.experts = figure.experts;
  options.top_k = figure.top_k;
  options.repetitions = repetitions;
  return options;
}

bool same_run(const ReadmeFigure& a, const ReadmeFigure& b) {
  const auto key = [](const ReadmeFigure& figure) {
    return std::make_tuple(figure.on_gpus(), figure.ranks, figure.tokens, figure.experts, figure.top_k,
                           figure.hidden, std::string(figure.format), std::string(figure.router));
  };
  return key(a) == key(b);
}

// Measures the figures of one run after another.
class ReadmeRunner {
 public:
  ReadmeRunner(int repetitions, const std::string& nccl) : repetitions_(repetitions), nccl_(nccl) {}

  // All of the same run.
  void measure(const std::vector<ReadmeResult*>& results) {
    const ReadmeFigure& figure = results.front()->figure;
    figure.on_gpus() ? measure_on_gpus(results) : measure_on_cpu(results);
  }

 private:
  void measure_on_cpu(const std::vector<ReadmeResult*>& results) {
    const BenchOptions options = options_of(results.front()->figure, repetitions_);
    const std::vector<Trace> traces = open_bench_traces(options);
    std::vector<BenchPoint> points;
    try {
      points = bench_points(options, traces);
    } catch (const SystemError& error) {
      for (ReadmeResult* result : results) result->skipped = error.what();  // does not fit into memory
      return;
    }
    const HostBenchRow row = run_host_point(points.front());
    for (ReadmeResult* result : results) {
      const HostCall& call = result->figure.work == Work::dispatch ? row.dispatch : row.combine;
      result->measured = call.bytes_per_second() / row.memcpy_bytes_per_second();
    }
  }

  void measure_on_gpus(const std::vector<ReadmeResult*>& results) {
    const ReadmeFigure& first = results.front()->figure;
    if (const std::string missing = missing_gpus(first.ranks); !missing.empty()) {
      for (ReadmeResult* result : results) result->skipped = missing;
      return;
    }
    BenchOptions options = options_of(first, repetitions_);
    options.works.clear();
    for (const ReadmeResult* result : results) add_works(result->figure, options.works);
    const std::vector<Trace> traces = open_bench_traces(options);
    GpuBenchReport report;
    report.limits.push_back(limits_of(first.ranks));
    for (const GpuCase& one : gpu_cases(options, traces)) report.add(run_gpu_case(one, nccl_));
    for (ReadmeResult* result : results) take(report.rows, *result);
  }

  static void add_works(const ReadmeFigure& figure, std::vector<std::string>& works) {
    const auto add = [&](const std::string& name) {
      if (std::find(works.begin(), works.end(), name) == works.end()) works.push_back(name);
    };
    add(to_string(figure.work));
    if (figure.ratio == ReadmeRatio::nccl) add("nccl");
  }

  static void take(const std::vector<GpuBenchRow>& rows, ReadmeResult& result) {
    const auto times_of_work = [&](Work work) -> const GpuTimes& {
      const auto same = [&](const GpuBenchRow& row) { return row.call.work == work; };
      return std::find_if(rows.begin(), rows.end(), same)->times;
    };
    const GpuTimes& own = times_of_work(result.figure.work);
    if (result.figure.ratio == ReadmeRatio::lower_bound) {
      result.measured = own.seconds.p50 / own.lower_bound_seconds();
      return;
    }
    const GpuTimes& nccl = times_of_work(Work::nccl);
    result.skipped = nccl.skipped;
    if (nccl.skipped.empty()) result.measured = nccl.seconds.p50 / own.seconds.p50;
  }

  // Empty if each rank has a GPU of its own.
  static std::string missing_gpus(int ranks) {
    try {
      const int gpus = static_cast<int>(gpu_names().size());
      if (gpus >= ranks) return "";
      return fmt::format("needs {} GPUs, one for each rank; this machine has {}", ranks, gpus);
    } catch (const UnsupportedError& error) {
      return error.what();
    }
  }

  const GpuLimits& limits_of(int ranks) {
    const auto found = limits_.find(ranks);
    return found != limits_.end() ? found->second
                                  : limits_.emplace(ranks, measure_gpu_limits(ranks)).first->second;
  }

  int repetitions_;
  std::string nccl_;
  std::map<int, GpuLimits> limits_;  // by ranks
};

// ---- reporting

std::string call_of(const ReadmeFigure& figure) {
  return fmt::format("{} {}, {} tokens a rank", to_string(figure.work), figure.format,
                     report::with_thousands(figure.tokens));
}

const char* quotient_of(ReadmeRatio ratio) {
  constexpr const char* kNames[] = {"time / lower bound", "NCCL's time / time", "rate / memcpy's"};
  return kNames[static_cast<int>(ratio)];
}

std::string rounded(double value, const ReadmeFigure& figure) {
  return fmt::format("{:.{}f}", value, figure.decimals);
}

std::string source_of(const ReadmeFigure& figure) {
  return fmt::format("README.md: {}, {}\n", figure.machine, figure.date);
}

// The text in lines of at most 100 columns, broken between words.
std::string in_columns(const std::string& text) {
  constexpr std::size_t kColumns = 100;
  std::string lines;
  std::size_t begin = 0;
  while (text.size() - begin > kColumns) {
    const std::size_t space = text.rfind(' ', begin + kColumns);
    if (space == std::string::npos || space <= begin) break;
    lines += text.substr(begin, space - begin) + '\n';
    begin = space + 1;
  }
  return lines + text.substr(begin) + '\n';
}

// Numbers the reasons, so that a line refers to its own.
class Footnotes {
 public:
  std::size_t number(const std::string& text) {
    const auto found = std::find(texts_.begin(), texts_.end(), text);
    if (found != texts_.end()) return static_cast<std::size_t>(found - texts_.begin()) + 1;
    texts_.push_back(text);
    return texts_.size();
  }
  std::string text() const {
    std::string lines;
    for (std::size_t i = 0; i < texts_.size(); ++i)
      lines += in_columns(fmt::format("({}) {}", i + 1, texts_[i]));
    return lines.empty() ? "" : "\n" + lines;
  }

 private:
  std::vector<std::string> texts_;
};

constexpr const char* kReadmeColumns =
    "call                                      figure                README measured  measured / README\n";

}  // namespace

const std::vector<ReadmeFigure>& readme_figures() {
  static const std::vector<ReadmeFigure> figures = {
#include "tools/ferry/bench/readme_figures.inc"
  };
  return figures;
}

std::vector<ReadmeResult> measure_readme(const std::vector<ReadmeFigure>& figures, int repetitions,
                                         const std::string& nccl) {
  std::vector<ReadmeResult> results;
  for (const ReadmeFigure& figure : figures) results.push_back({.figure = figure});
  std::vector<std::vector<ReadmeResult*>> runs;
  for (ReadmeResult& result : results) {
    const auto found = std::find_if(runs.begin(), runs.end(), [&](const std::vector<ReadmeResult*>& run) {
      return same_run(run.front()->figure, result.figure);
    });
    (found == runs.end() ? runs.emplace_back() : *found).push_back(&result);
  }
  const Progress progress("measuring, run", static_cast<std::int64_t>(runs.size()));
  progress.show();
  ReadmeRunner runner(repetitions, nccl);
  for (const std::vector<ReadmeResult*>& run : runs) {
    runner.measure(run);
    progress.advance();
  }
  return results;
}

std::string readme_table(const std::vector<ReadmeResult>& results) {
  std::string text = fmt::format("Machine: {}.\n", machine_line());
  std::string source;
  Footnotes reasons;
  for (const ReadmeResult& result : results) {
    const ReadmeFigure& figure = result.figure;
    if (source_of(figure) != source) text += "\n" + (source = source_of(figure)) + kReadmeColumns;
    text += fmt::format("{:<41} {:<20} {:>7} ", call_of(figure), quotient_of(figure.ratio),
                        rounded(figure.value, figure));
    text += result.skipped.empty() ? fmt::format("{:>8} {:>18.2f}\n", rounded(result.measured, figure),
                                                 result.measured / figure.value)
                                   : fmt::format("not measured ({})\n", reasons.number(result.skipped));
  }
  return text + reasons.text();
}

nlohmann::ordered_json readme_json(const std::vector<ReadmeResult>& results) {
  nlohmann::ordered_json json = bench_json("ferry.bench.readme", 1);
  json["figures"] = nlohmann::ordered_json::array();
  for (const ReadmeResult& result : results) {
    const ReadmeFigure& figure = result.figure;
    nlohmann::ordered_json one{{"call", to_string(figure.work)},   {"figure", quotient_of(figure.ratio)},
                               {"format", figure.format},          {"ranks", figure.ranks},
                               {"tokens", figure.tokens},          {"hidden", figure.hidden},
                               {"experts", figure.experts},        {"top_k", figure.top_k},
                               {"router", figure.router},          {"readme", figure.value},
                               {"readme_machine", figure.machine}, {"readme_date", figure.date}};
    if (result.skipped.empty()) {
      one["measured"] = result.measured;
      one["ratio"] = result.measured / figure.value;
    } else {
      one["skipped"] = result.skipped;
    }
    json["figures"].push_back(std::move(one));
  }
  return json;
}

}  // namespace ferry::app
