#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/runtime/error.hpp"
#include "cuda/memory/kernels.hpp"

namespace ferry::test {

namespace {

__device__ bool in_time(unsigned long long start) {
  constexpr unsigned long long kNanoseconds = 30'000'000'000;
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now - start < kNanoseconds;
}

__device__ unsigned long long start_time() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void fill(std::uint32_t* words, std::int64_t count, std::uint64_t key) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t i = first; i < count; i += step) words[i] = pattern(key, i);
}

__global__ void access_peer(volatile std::uint32_t* words, const volatile std::uint32_t* stop,
                            std::uint64_t* rounds) {
  const unsigned long long start = start_time();
  std::uint32_t round = 0, sum = 0;
  while (*stop == 0 && in_time(start)) {
    words[threadIdx.x] = ++round;
    sum += words[threadIdx.x + 32];
  }
  if (threadIdx.x == 0) *rounds = round + (sum == 1);  // uses `sum`, so that the loads are not optimised away
}

__global__ void wait_for_abort(const Flag* abort) {
  const unsigned long long start = start_time();
  while (cuda::load_relaxed_sys(abort) == 0 && in_time(start)) {
  }
}

__global__ void report_timeout(cuda::HostSignals* report, WaitRecord record) {
  report->timeout = record;
  // Release: the record must be visible before the flag.
  cuda::store_release_sys(&report->timed_out, 1);
}

}  // namespace

void start_fill(cudaStream_t stream, std::uint32_t* words, std::int64_t count, std::uint64_t key) {
  fill<<<8, 256, 0, stream>>>(words, count, key);
  cuda::check(cudaGetLastError(), "launch a kernel");
}

void start_peer_access(cudaStream_t stream, std::uint32_t* words, const std::uint32_t* stop,
                       std::uint64_t* rounds) {
  access_peer<<<1, 32, 0, stream>>>(words, stop, rounds);
  cuda::check(cudaGetLastError(), "launch a kernel");
}

void start_wait(cudaStream_t stream, cuda::HostSignals* report) {
  wait_for_abort<<<1, 1, 0, stream>>>(&report->abort);
  cuda::check(cudaGetLastError(), "launch a kernel");
}

void start_timeout(cudaStream_t stream, cuda::HostSignals* report, const WaitRecord& record) {
  report_timeout<<<1, 1, 0, stream>>>(report, record);
  cuda::check(cudaGetLastError(), "launch a kernel");
}

}  // namespace ferry::test
