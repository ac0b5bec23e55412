// A kernel that adds rows by lists of their numbers.
#pragma once

#include "backends/cuda/runtime/launch.hpp"
#include "exchange/device_work.hpp"

namespace ferry::cuda {

extern const Kernel<ListedSums> kListedSumsKernel;

}  // namespace ferry::cuda
