// Kernels for tests of single classes: they write, poll and report as a rank's kernels do.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backends/cuda/protocol/host_signals.hpp"
#include "base/host_device.hpp"

namespace ferry::test {

// Word `index` of the pseudo-random sequence with this key.
FERRY_HD std::uint32_t pattern(std::uint64_t key, std::int64_t index) {
  std::uint64_t value = key + 0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(index + 1);
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return static_cast<std::uint32_t>(value >> 32);
}

// The functions below launch a kernel and return at once; they throw SystemError if the launch fails. Every
// kernel returns after 30 s, even if it still waits.

// Writes `count` words of the sequence.
void start_fill(cudaStream_t stream, std::uint32_t* words, std::int64_t count, std::uint64_t key);

// Repeatedly stores to the first 32 words and loads the next 32 until *stop is not 0, then stores the number
// of rounds in *rounds. `stop` and `rounds` are pinned host memory.
void start_peer_access(cudaStream_t stream, std::uint32_t* words, const std::uint32_t* stop,
                       std::uint64_t* rounds);

// Waits like a kernel of the backend: until the host sets the abort word.
void start_wait(cudaStream_t stream, cuda::HostSignals* report);

// Reports a timeout like a kernel of the backend whose wait exceeds its deadline.
void start_timeout(cudaStream_t stream, cuda::HostSignals* report, const WaitRecord& record);

}  // namespace ferry::test
