// Device memory set to zero: two ranges by one launch, as each operation takes the host microseconds to
// start.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::cuda {

// Begins at a multiple of 16 bytes, or is empty.
struct MemoryRange {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

void clear(const MemoryRange& first, const MemoryRange& second, cudaStream_t stream);

}  // namespace ferry::cuda
