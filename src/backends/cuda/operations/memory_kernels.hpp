// Kernels that zero device memory, fill and check guard bytes, and add rows by lists of their numbers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/runtime/launch.hpp"
#include "base/host_device.hpp"
#include "exchange/device_work.hpp"

namespace ferry::cuda {

// `data` is a multiple of 16 bytes, or the range is empty.
struct MemoryRange {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

// Zeroes two ranges in one launch, because each launch costs the host microseconds.
void clear(const MemoryRange& first, const MemoryRange& second, cudaStream_t stream);

// Guard bytes behind rows that the caller's encoder writes (test builds).
struct RowGuardArguments {
  GuardedRows rows;
  int value;                    // of every guard byte
  int part;                     // of the rows
  unsigned long long* written;  // largest BrokenGuard so far, as a number; 0: none
};

FERRY_HD constexpr unsigned long long number_of(const BrokenGuard& broken) {
  return static_cast<unsigned long long>(broken.part) << 40 | static_cast<unsigned long long>(broken.row + 1);
}
FERRY_HD constexpr BrokenGuard broken_guard(unsigned long long number) {
  return {static_cast<int>(number >> 40), static_cast<std::int64_t>(number & 0xFFFFFFFFFF) - 1};
}

extern const Kernel<RowGuardArguments> kFillGuardsKernel, kCheckGuardsKernel;
extern const Kernel<ListedSums> kListedSumsKernel;

}  // namespace ferry::cuda
