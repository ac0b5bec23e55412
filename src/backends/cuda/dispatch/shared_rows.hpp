// Shared experts in dispatch: their rows are this rank's own tokens, so a launch of its own writes them.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/dispatch/dispatch.hpp"

namespace ferry::cuda {

// Writes the rows of shared experts, their sources, weights, dot products and groups; dispatch writes padding
// rows. It waits for no rank. `blocks`: thread blocks at most.
void launch_shared_rows(const DispatchArguments& arguments, int blocks, cudaStream_t stream);

void prepare_shared_rows();  // loads the kernels on the current device

}  // namespace ferry::cuda
