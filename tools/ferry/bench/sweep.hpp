// The points of a `ferry bench` sweep: every combination of the option values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ferry/trace.hpp"
#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/common/config.hpp"

namespace ferry::app {

// The options of `ferry bench`, with their defaults.
struct BenchOptions {
  std::vector<std::string> traces;  // empty: synth:uniform, synth:decode and the first recorded trace, if any
  std::string tokens = "1:2048";
  std::vector<int> ranks{4};
  std::string backend = "cpu";
  EngineChoice choice;                 // of collective
  std::optional<double> global_scale;  // g of nvfp4; none: 1
  std::vector<std::string> formats{"bf16"}, layouts{"expert_major"}, reductions{"partial"};
  // Only for GPUs:
  std::vector<std::string> works{"dispatch", "combine"}, weights{"with"}, launches{"graph"}, forms{"fused"};
  std::vector<int> sms{0};
  std::string nccl;  // path of the library; empty: searched

  bool processes = false;
  int hosts = 1;  // simulated
  std::string hops = "automatic";
  int hidden = 7168;
  int experts = 0;  // 0: as the first recorded trace has, otherwise 256
  int top_k = 0;    // 0: as the first recorded trace has, otherwise 8
  int repetitions = 50;
  std::uint64_t seed = 1;
  bool readme = false;  // README's figures in place of a sweep
  std::string json;
};

// "1:64" doubles from the first to the last; "1,5,64" is a list. Throws UsageError.
std::vector<int> parse_sweep(const std::string& text);

// Throws UsageError or SystemError for a trace that cannot be opened.
std::vector<Trace> open_bench_traces(const BenchOptions& options);

// All points for the CPU and for collective, in the order of the table.
// @throws UsageError        an option of another backend, or what constructing an exchange would refuse
// @throws UnsupportedError  collective on GPUs where there are none
// @throws SystemError  a point that does not fit into memory
std::vector<BenchPoint> bench_points(const BenchOptions& options, const std::vector<Trace>& traces);

// How long a point takes, in no particular unit: the bytes received in all of its calls, and for each call
// those that take as long as its start.
double work_of(const BenchPoint& point);
inline double work_of(const GpuCase& one) {
  return work_of(one.point) * static_cast<double>(one.calls.size());
}

// All points for GPUs; points that differ only in the calls to time become one case. Leaves out combinations
// that no call has (reductions other than partial for rank_major), and times only once what depends neither
// on the format nor on the layout.
// @throws UsageError  nothing is left to time, or what constructing an exchange would refuse
std::vector<GpuCase> gpu_cases(const BenchOptions& options, const std::vector<Trace>& traces);

// Resets the fields that have no meaning for the call, so that equivalent calls compare equal. Empty for a
// combination that no call has.
std::optional<TimedCall> normalised(TimedCall call, Layout layout);

}  // namespace ferry::app
