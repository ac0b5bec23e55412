// Moving rows with bulk copies: each warp has a piece of shared memory through which rows pass.
#pragma once

#include "cuda/ptx.cuh"

namespace ferry::cuda {

inline constexpr int kStageBytes = 14848;  // a row of 7,168 16-bit values, or of fp8 values with their scales

// A piece of shared memory of one warp. Its first thread does the copying; the others only agree on when.
struct Stage {
  std::byte* memory;       // kStageBytes, aligned to 128
  std::uint64_t* arrival;  // one word
  std::uint32_t parity = 0;

  // First thread: starts to fill the stage, which is free.
  __device__ void start_load(const void* from, std::uint32_t bytes) {
    arrival_expect(arrival, bytes);
    bulk_load(memory, from, bytes, arrival);
  }

  // Waits for the bytes that were announced on `arrival`. Every thread that calls it keeps its own parity.
  __device__ void await_load() {
    arrival_wait(arrival, parity);
    parity ^= 1;
  }
};

}  // namespace ferry::cuda
