// Runs one point or case of `ferry bench`: checks every input set, then times.
#pragma once

#include <string>
#include <vector>

#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

// All throw CheckFailed if a check fails.

// Ranks are threads or processes on the CPU.
HostBenchRow run_host_point(const BenchPoint& point);

// Ranks are threads; a rank's GPU is its number modulo the number of GPUs. Does not fill in
// GpuTimes::push_bytes_per_second. `nccl`: path of the NCCL library, or empty.
// @throws UnsupportedError  this build or machine has no GPU
std::vector<GpuBenchRow> run_gpu_case(const GpuCase& gpu_case, const std::string& nccl);

// The baseline without Ferry: sorts routes by destination rank, exchanges counts, and moves one row per route
// with an NCCL all-to-all-v. Received rows lie in the order of source rank, token and slot; nothing says
// which expert a row is for. `work` is Work::nccl or Work::nccl_rows. Without NCCL, or with several ranks per
// GPU, GpuTimes::skipped says so. Does not fill in the lower bound.
GpuTimes run_nccl_baseline(const BenchPoint& point, Work work, const std::string& nccl);

// The point as the NCCL baseline moves it: rows of the tokens' type.
BenchPoint without_quantisation(const BenchPoint& point);

}  // namespace ferry::app
