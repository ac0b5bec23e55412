// The launch between the phases of a call over NVSHMEM. Included once by each file that compiles it:
// module.cu for narrow kernels, wide_hops.cu for wide ones.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "backends/cuda/transport/transport.cuh"
#include "backends/cuda/two_hops/hop_block.cuh"
#include "backends/nvshmem/module/module.hpp"

namespace ferry::nvshmem::inline FERRY_WIDTH {

// The transport policy over NVSHMEM: puts, and signals after them, to ranks of other nodes; plain stores to
// ranks of this node. Symmetric memory comes from NVSHMEM's heap.
//
// The code is the same whether NVSHMEM puts by mapped memory, by the GPU's own requests to the NIC (IBGDA) or
// by a thread of the host (IBRC).
struct Puts : cuda::PlainStores {
  Peers peers;

  __device__ bool is_staged(int peer) const { return peers.remote.has(peer); }

  __device__ void put(const cuda::LaneView& lane, int peer, std::byte* place, const std::byte* from,
                      int bytes) const {
    if (!is_staged(peer)) return PlainStores::put(lane, peer, place, from, bytes);
    cuda::inject_fault(lane, cuda::KernelPoint::row);
    // Begins and ends with a barrier of the warp.
    nvshmemx_putmem_nbi_warp(place, from, static_cast<std::size_t>(bytes), peers.pes[peer]);
  }

  __device__ void put_with_signal(const cuda::LaneView& lane, int peer, std::byte* place,
                                  const std::byte* from, int bytes, const cuda::FlagValue& announced) const {
    if (!is_staged(peer)) return PlainStores::put_with_signal(lane, peer, place, from, bytes, announced);
    cuda::inject_fault(lane, cuda::KernelPoint::row);
    nvshmemx_putmem_signal_nbi_warp(place, from, static_cast<std::size_t>(bytes), word_of(announced.flag),
                                    announced.value, NVSHMEM_SIGNAL_SET, peers.pes[peer]);
  }

  __device__ void signal(const cuda::LaneView& lane, int peer, Flag* flag, std::uint64_t value) const {
    if (!is_staged(peer)) return PlainStores::signal(lane, peer, flag, value);
    cuda::inject_fault(lane, cuda::KernelPoint::flag);
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    // Release at system scope: the warp's loads before the signal. nvshmem_fence() would also wait for puts,
    // of all warps to all PEs where the GPU drives the NIC, and has no deadline.
    cuda::fence_acq_rel_sys();
    nvshmemx_signal_op(word_of(flag), value, NVSHMEM_SIGNAL_SET, peers.pes[peer]);
  }

  __device__ cuda::WaitResult wait(const cuda::LaneView& lane, const Flag* flag, std::uint64_t value,
                                   const Flag* end_of_stream, cuda::WaitTarget target) const {
    const cuda::WaitResult result = cuda::wait_count(lane, flag, value, end_of_stream, target);
    if (result == cuda::WaitResult::ready) acquire(flag, value);
    return result;
  }

  // NVSHMEM's own test does what its network needs before the bytes behind a flag are read.
  __device__ void acquire(const Flag* flag, std::uint64_t value) const {
    nvshmem_uint64_test(word_of(const_cast<Flag*>(flag)), NVSHMEM_CMP_GE, value);
  }

 private:
  __device__ static std::uint64_t* word_of(Flag* flag) { return &flag->value; }
};

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

}  // namespace

// Return a cudaError_t.
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

}  // namespace ferry::nvshmem::inline FERRY_WIDTH
