#include "tools/ferry/bench/sweep.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>

#include "ferry/error.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/run/run_options.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

constexpr double kDeviceDeadline = 60.0;  // there, checks between calls are short
constexpr int kLaunches = 20;             // of a short call
constexpr std::int64_t kShort = 2 << 20;  // bytes that arrive at a rank

double bytes_needed(const BenchPoint& point) {
  double bytes = 0;
  for (int rank = 0; rank < point.ranks; ++rank) {
    const Sizes sizes = size_of(point.config, point.ranks, rank);
    bytes += static_cast<double>(sizes.total() - sizes.results);
  }
  const double tokens = static_cast<double>(point.ranks) * point.tokens;
  const double row = static_cast<double>(point.token_bytes());
  bytes += tokens * row * (BenchInputs::kSets + 1);  // inputs and results
  bytes += tokens * row * point.config.top_k;        // arrived rows
  return bytes;
}

void check_memory(const BenchPoint& point) {
  const double bytes = bytes_needed(point);
  const auto available = static_cast<double>(available_memory_bytes());
  if (available == 0 || bytes < available) return;
  throw SystemError(fmt::format("{} of {}, hidden {}, would take {:.1f} GB, {:.1f} GB are free",
                                report::counted(point.ranks, "rank"), report::counted(point.tokens, "token"),
                                point.config.hidden, bytes * 1e-9, available * 1e-9),
                    ENOMEM);
}

// Whether any token lists an expert twice: then the memory for arrivals has to be larger.
bool repeats_experts(const Trace& trace) {
  for (std::size_t first = 0; first < trace.ids.size(); first += static_cast<std::size_t>(trace.top_k)) {
    const auto begin = trace.ids.begin() + static_cast<std::ptrdiff_t>(first);
    std::vector<std::int32_t> ids(begin, begin + trace.top_k);
    std::erase(ids, -1);
    std::sort(ids.begin(), ids.end());
    if (std::adjacent_find(ids.begin(), ids.end()) != ids.end()) return true;
  }
  return false;
}

void refuse_device_options(const BenchOptions& options) {
  const BenchOptions plain;
  const auto refuse = [](const char* name) {
    throw UsageError(fmt::format("{} with --backend cpu: it is for GPUs alone", name));
  };
  if (options.works != plain.works) refuse("--work");
  if (options.weights != plain.weights) refuse("--weights");
  if (options.launches != plain.launches) refuse("--launch");
  if (options.forms != plain.forms) refuse("--form");
  if (options.sms != plain.sms) refuse("--sms");
  if (!options.nccl.empty()) refuse("--nccl");
}

}  // namespace

BenchPoint make_point(const BenchOptions& options, const Trace& trace, int ranks, int tokens,
                      const std::string& format, const std::string& layout, Reduction reduction) {
  BenchPoint point;
  point.trace = &trace;
  point.ranks = ranks;
  point.processes = options.processes;
  point.tokens = tokens;
  point.repetitions = options.repetitions;
  Config& config = point.config;
  config.backend = backend_of(options.backend);
  config.experts = trace.experts;
  config.top_k = trace.top_k;
  config.hidden = options.hidden;
  config.max_tokens = tokens;
  config.placement = Placement::blocks(trace.experts, ranks);
  config.layout = layout_of(layout);
  config.repeats = repeats_experts(trace);
  config.format = format_of(format);
  config.combine_type = point.type = token_type(config.format);
  config.reduction = reduction;
  config.deadline = config.backend == BackendKind::cuda ? kDeviceDeadline : kDeadline;
  size_of(config, ranks);  // refuses what construction would
  const std::int64_t arriving = std::int64_t{tokens} * config.top_k * point.token_bytes();
  point.launches = config.backend == BackendKind::cuda || arriving <= kShort ? kLaunches : 1;
  return point;
}

std::vector<BenchPoint> bench_points(const BenchOptions& options, const std::vector<Trace>& traces) {
  refuse_device_options(options);
  std::vector<BenchPoint> points;
  for (const int ranks : options.ranks) {
    for (const std::string& format : options.formats) {
      for (const std::string& layout : options.layouts) {
        for (const std::string& reduction : options.reductions) {
          if (layout == "rank_major" && reduction != "partial") {
            throw UsageError(fmt::format(
                "--reduction {} with --layout rank_major: its rows are sums already, only partial adds them",
                reduction));
          }
          for (const int tokens : parse_sweep(options.tokens)) {
            for (const Trace& trace : traces) {
              points.push_back(
                  make_point(options, trace, ranks, tokens, format, layout, reduction_of(reduction)));
              check_memory(points.back());
            }
          }
        }
      }
    }
  }
  return points;
}

}  // namespace ferry::app
