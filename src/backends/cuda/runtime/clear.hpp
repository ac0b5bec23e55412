// Zeroes device memory: two ranges in one launch, because each launch costs the host microseconds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::cuda {

// `data` is a multiple of 16 bytes, or the range is empty.
struct MemoryRange {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

void clear(const MemoryRange& first, const MemoryRange& second, cudaStream_t stream);

}  // namespace ferry::cuda
