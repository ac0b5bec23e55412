// Replicated input: the hash of N and ids that ranks compare, to detect different inputs.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/dispatch/dispatch.hpp"

namespace ferry::cuda {

// Computes LaneState::input_hash for a dispatch from ids, which follows on the stream. `blocks`: thread
// blocks at most.
void launch_input_hash(const DispatchArguments& arguments, int blocks, cudaStream_t stream);

void prepare_input_hash();  // loads the kernels on the current device

}  // namespace ferry::cuda
