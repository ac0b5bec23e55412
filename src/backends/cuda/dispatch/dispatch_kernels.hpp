// The compiled kernels of dispatch. Each function's kernels are instantiated in a translation unit of their own, so that
// they compile side by side.
#pragma once

#include "backends/cuda/device/phase.hpp"

namespace ferry::cuda {

const void* many_tokens_kernel(bool quantises);      // dispatch_fused.cu
const void* few_tokens_kernel(bool quantises);       // dispatch_fused.cu
const void* count_on_device_kernel(bool quantises);  // dispatch_count_on_device.cu
const void* by_plan_kernel(bool quantises);          // dispatch_by_plan.cu
const void* generic_kernel(Phase phase);             // dispatch_generic.cu

}  // namespace ferry::cuda
