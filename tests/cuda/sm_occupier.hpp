// A kernel that occupies SMs, to stand for other work on a device.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>

namespace ferry::contract {

// Enqueues a kernel that occupies all SMs of the current device except `left_free` for the given time.
void occupy_sms(cudaStream_t stream, int left_free, std::chrono::nanoseconds time);

}  // namespace ferry::contract
