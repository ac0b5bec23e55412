// The baseline of `ferry bench` on GPUs: what is done by hand without an exchange. Routes are sorted by rank,
// counts are exchanged, and an all-to-all-v of NCCL carries a row for each route. What arrives lies by source
// rank, token and slot; nothing says which expert a row is for.
#pragma once

#include <string>

#include "tools/ferry/bench/device_work.hpp"

namespace ferry::app {

// The point with rows as NCCL carries them: of the tokens' type.
BenchPoint without_quantisation(const BenchPoint& point);

// Checks every set, then times Work::nccl or Work::nccl_rows. Without NCCL, or with several ranks on a GPU,
// GpuTimes::skipped says so. Floor and push are left open. Throws CheckFailed when a check fails.
GpuTimes run_nccl_baseline(const BenchPoint& point, Work work, const std::string& nccl);

}  // namespace ferry::app
