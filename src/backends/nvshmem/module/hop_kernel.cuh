// The launch between the phases of a call over NVSHMEM. Included once by each file that compiles it:
// module.cu for narrow kernels, wide_hops.cu for wide ones.
#pragma once

#include "backends/cuda/two_hops/hop_block.cuh"
#include "backends/nvshmem/module/puts.cuh"

namespace ferry::nvshmem::inline FERRY_WIDTH {
namespace {

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    hop_kernel(const __grid_constant__ cuda::HopArguments call, const __grid_constant__ Puts puts) {
  __shared__ cuda::HopState state;
  cuda::HopBlock<Puts>(call, puts, &state).run();
}

using HopKernel = void (*)(cuda::HopArguments, Puts);

// The kernel with blocks of `threads`.
HopKernel hop_kernel_of(int threads) {
  if constexpr (!cuda::kWide) {
    if (threads == cuda::kManyHopThreads) return hop_kernel<cuda::kManyHopThreads>;
  }
  return hop_kernel<cuda::kHopThreads>;
}

// Loads a kernel before its first launch. Returns a cudaError_t.
int load_kernel(HopKernel kernel) {
  cudaFuncAttributes attributes{};
  return static_cast<int>(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
}

int prepare_hop_kernel() {
  const int status = load_kernel(hop_kernel_of(cuda::kHopThreads));
  if (status != 0 || cuda::kWide) return status;
  return load_kernel(hop_kernel_of(cuda::kManyHopThreads));
}

int launch_hop_kernel(const cuda::HopArguments& arguments, const Peers& peers, const HopLaunch& launch) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(static_cast<unsigned>(arguments.threads));
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &attribute;
  config.numAttrs = launch.cooperative ? 1 : 0;
  return static_cast<int>(
      cudaLaunchKernelEx(&config, hop_kernel_of(arguments.threads), arguments, Puts{{}, peers}));
}

}  // namespace
}  // namespace ferry::nvshmem::inline FERRY_WIDTH
