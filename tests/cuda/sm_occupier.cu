#include "cuda/sm_occupier.hpp"

#include "harness/require_success.hpp"

namespace ferry::contract {
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

}  // namespace

void occupy_sms(cudaStream_t stream, int left_free, std::chrono::nanoseconds time) {
  int device = 0, sms = 0, shared = 0;
  device::require_success(cudaGetDevice(&device), "cudaGetDevice");
  device::require_success(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "SMs");
  device::require_success(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                          "shared memory");
  // A block uses all shared memory of an SM, so that no second block of the kernel fits on it.
  device::require_success(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                          "cudaFuncSetAttribute");
  spin<<<sms - left_free, 32, static_cast<std::size_t>(shared), stream>>>(
      static_cast<unsigned long long>(time.count()));
  device::require_success(cudaGetLastError(), "launching the kernel that occupies SMs");
}

}  // namespace ferry::contract
