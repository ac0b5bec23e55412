// A case of `ferry bench` on GPUs: ranks are threads, and take the GPUs in turn.
#pragma once

#include <string>
#include <vector>

#include "tools/ferry/bench/device_work.hpp"

namespace ferry::app {

// Plays every work of the case: checks every set of inputs, then times. GpuTimes::push_bytes_per_second is
// left open. `nccl` names its library, or is empty. Throws CheckFailed when a check fails, UnsupportedError
// without a GPU.
std::vector<GpuBenchRow> run_gpu_case(const GpuCase& of, const std::string& nccl);

}  // namespace ferry::app
