// A kernel that keeps SMs busy.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>

namespace ferry::contract {

// Puts a kernel on the stream that takes whole SMs of the current device, all but `left_free`, for a while.
void occupy(cudaStream_t stream, int left_free, std::chrono::nanoseconds time);

}  // namespace ferry::contract
