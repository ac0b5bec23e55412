// Kernels that play a rank's part in tests, and the words they write.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/protocol/report.hpp"
#include "base/host_device.hpp"

namespace ferry::test {

// Word number `index` of what `key` stands for.
FERRY_HD std::uint32_t pattern(std::uint64_t key, std::int64_t index) {
  std::uint64_t value = key + 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(index + 1);
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return static_cast<std::uint32_t>(value >> 32);
}

// All of these return before the kernel ends, and throw SystemError if it cannot be started. None of them
// runs longer than half a minute, whatever happens to those it waits for.

void start_fill(cudaStream_t stream, std::uint32_t* words, std::int64_t count, std::uint64_t key);

// Stores into the first 32 words and reads the next 32, until *stop is not 0; *rounds says how often. The
// last two are pinned.
void start_hammer(cudaStream_t stream, std::uint32_t* words, const std::uint32_t* stop,
                  std::uint64_t* rounds);

// As a kernel of the backend waits: until the host says abort.
void start_wait(cudaStream_t stream, cuda::HostReport* report);

// As a kernel of the backend whose wait runs out of time.
void start_time_out(cudaStream_t stream, cuda::HostReport* report, const WaitRecord& record);

}  // namespace ferry::test
