// Moving rows with bulk copies: each warp has a piece of shared memory through which rows pass.
#pragma once

#include "cuda/ptx.cuh"

namespace ferry::cuda {

inline constexpr int kStageBytes = 16384;

// A warp's stage. Its first thread does the copying; the others only agree on when.
struct Stage {
  std::byte* memory;       // kStageBytes, aligned to 128
  std::uint64_t* arrival;  // one word
  std::uint32_t parity = 0;

  // First thread: the stage may be filled again.
  __device__ void reuse() { bulk_wait_read(); }

  // First thread: waits for the `bytes` that bulk loads announced on `arrival` bring.
  __device__ void await_loads() {
    arrival_wait(arrival, parity);
    parity ^= 1;
  }

  // First thread: loads and waits.
  __device__ void load(const void* from, std::uint32_t bytes) {
    arrival_expect(arrival, bytes);
    bulk_load(memory, from, bytes, arrival);
    await_loads();
  }
};

}  // namespace ferry::cuda
