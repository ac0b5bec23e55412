#include "cuda/other_work.hpp"

#include <cstdint>
#include <new>
#include <thread>

#include "harness/require_success.hpp"

namespace ferry::contract {

using device::require_success;

struct HeldKernelWords {
  std::uint32_t started, released, ended;
};

namespace {

__device__ unsigned long long now() {
  unsigned long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

__global__ void spin(unsigned long long nanoseconds) {
  const unsigned long long end = now() + nanoseconds;
  while (now() < end) __nanosleep(1000);
}

__global__ void hold(volatile HeldKernelWords* words) {
  const unsigned long long end = now() + 10'000'000'000ull;
  words->started = 1;
  while (words->released == 0 && now() < end) __nanosleep(1000);
  words->ended = 1;
}

__global__ void store_to(volatile int* nowhere) {
  *nowhere = 1;
}

}  // namespace

void fail_device(cudaStream_t stream) {
  store_to<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(8));
  require_success(cudaGetLastError(), "launching the kernel that fails");
}

void occupy_sms(cudaStream_t stream, int left_free, std::chrono::nanoseconds time) {
  int device = 0, sms = 0, shared = 0;
  require_success(cudaGetDevice(&device), "cudaGetDevice");
  require_success(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "SMs");
  require_success(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                  "shared memory");
  // A block uses all shared memory of an SM, so that no second block of the kernel fits on it.
  require_success(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                  "cudaFuncSetAttribute");
  spin<<<sms - left_free, 32, static_cast<std::size_t>(shared), stream>>>(
      static_cast<unsigned long long>(time.count()));
  require_success(cudaGetLastError(), "launching the kernel that occupies SMs");
}

HeldKernel::HeldKernel() {
  void* words = nullptr;
  require_success(cudaMallocHost(&words, sizeof(HeldKernelWords)), "cudaMallocHost");
  words_ = new (words) HeldKernelWords{};
}

HeldKernel::~HeldKernel() {
  cudaFreeHost(const_cast<HeldKernelWords*>(words_));
}

void HeldKernel::launch(cudaStream_t stream) {
  words_->started = 0;
  words_->released = 0;
  words_->ended = 0;
  hold<<<1, 1, 0, stream>>>(words_);
  require_success(cudaGetLastError(), "launching the held kernel");
}

bool HeldKernel::wait_until_it_runs(std::chrono::seconds most) const {
  const auto end = std::chrono::steady_clock::now() + most;
  while (words_->started == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return words_->started != 0;
}

bool HeldKernel::runs() const {
  return words_->started != 0 && words_->ended == 0;
}

void HeldKernel::release() {
  words_->released = 1;
}

}  // namespace ferry::contract
