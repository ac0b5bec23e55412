#include "tools/ferry/bench/device_cases.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <set>

#include "ferry/error.hpp"
#include "tools/ferry/bench/sweep.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/run/run_options.hpp"

namespace ferry::app {

namespace {

std::vector<Work> works_named(const std::string& name) {
  if (name == "plan") return {Work::dispatch_plan};
  if (name == "nccl") return {Work::nccl, Work::nccl_rows};
  for (const Work work : {Work::dispatch, Work::combine, Work::pair, Work::metadata})
    if (name == to_string(work)) return {work};
  throw UsageError(fmt::format("--work {}: there is no such work", name));
}

// By launch and work, then by what sets its calls apart.
std::vector<GpuWork> all_works(const BenchOptions& options) {
  std::vector<GpuWork> works;
  const auto add = [&](Work work, bool eager, bool in_phases) {
    for (const std::string& reduction : options.reductions) {
      for (const std::string& weights : options.weights) {
        for (const int sms : options.sms)
          works.push_back({work, reduction_of(reduction), weights == "with", eager, in_phases, sms});
      }
    }
  };
  for (const std::string& launch : options.launches) {
    for (const std::string& name : options.works) {
      for (const Work work : works_named(name)) {
        for (const std::string& form : options.forms) add(work, launch == "eager", form == "halves");
      }
    }
  }
  return works;
}

std::vector<GpuWork> works_of_layout(const BenchOptions& options, Layout layout) {
  std::vector<GpuWork> works;
  for (const GpuWork& asked : all_works(options)) {
    const std::optional<GpuWork> one = normalised(asked, layout);
    if (one && std::find(works.begin(), works.end(), *one) == works.end()) works.push_back(*one);
  }
  return works;
}

// The largest of a case: it sizes the exchange's memory and the result.
Reduction largest_reduction(const std::vector<GpuWork>& works) {
  const auto any = [&](Reduction reduction) {
    return std::any_of(works.begin(), works.end(), [&](const GpuWork& work) {
      return work.combines() && work.reduction == reduction;
    });
  };
  if (any(Reduction::unreduced)) return Reduction::unreduced;
  return any(Reduction::exact) ? Reduction::exact : Reduction::partial;
}

void add_cases(const BenchOptions& options, const std::vector<Trace>& traces, int ranks,
               std::vector<GpuCase>& cases) {
  std::set<DType> types;  // whose rows have been combined, and moved by NCCL
  bool first = true;
  for (const std::string& format : options.formats) {
    const bool fresh = types.insert(token_type(format_of(format))).second;
    for (const std::string& layout : options.layouts) {
      for (const int tokens : parse_sweep(options.tokens)) {
        for (const Trace& trace : traces) {
          std::vector<GpuWork> works = works_of_layout(options, layout_of(layout));
          std::erase_if(works, [&](const GpuWork& work) {
            if (work.work == Work::metadata) return !first;
            if (work.of_nccl()) return !fresh || layout != options.layouts.front();
            return work.work == Work::combine && !fresh;
          });
          if (works.empty()) continue;
          first = false;
          const BenchPoint point =
              make_point(options, trace, ranks, tokens, format, layout, largest_reduction(works));
          cases.push_back({point, works});
        }
      }
    }
  }
}

}  // namespace

std::vector<GpuCase> gpu_cases(const BenchOptions& options, const std::vector<Trace>& traces) {
  if (options.processes) throw UsageError("--processes with --backend cuda: its ranks are threads");
  std::vector<GpuCase> cases;
  for (const int ranks : options.ranks) add_cases(options, traces, ranks, cases);
  if (cases.empty()) {
    throw UsageError(
        "nothing to time: rows of rank_major are sums already, so --reduction partial is all they take");
  }
  return cases;
}

}  // namespace ferry::app
