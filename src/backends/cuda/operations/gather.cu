#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/operations/gather.cuh"

#include "backends/cuda/device/shared_copy.cuh"

namespace ferry::cuda {
namespace {

template <bool kAdds, DType kType = DType::bf16>
__global__ void __launch_bounds__(kGatherThreads, 1)
    gather_kernel(const __grid_constant__ GatherArguments arguments) {
  __shared__ GatherArguments call;
  __shared__ GatherState state;
  copy_to_shared(arguments, &call, threadIdx.x, kGatherThreads);
  __syncthreads();
  if constexpr (kAdds) {
    reduce_scatter<kType>(call, &state);
  } else {
    all_gather(call, &state);
  }
}

template <DType kType>
__global__ void __launch_bounds__(kGatherThreads, 1)
    add_blocks_kernel(const __grid_constant__ AddedBlocks call) {
  add_blocks<kType>(call);
}

constexpr const char* kReduceScatter = "launch reduce_scatter_v";

}  // namespace

const Kernel<GatherArguments> kAllGatherKernel{&gather_kernel<false>, kGatherThreads, "launch all_gather_v"};
const Kernel<GatherArguments> kReduceScatterKernels[3] = {
    {&gather_kernel<true, DType::bf16>, kGatherThreads, kReduceScatter},
    {&gather_kernel<true, DType::fp16>, kGatherThreads, kReduceScatter},
    {&gather_kernel<true, DType::fp32>, kGatherThreads, kReduceScatter}};
const Kernel<AddedBlocks> kAddBlocksKernels[3] = {
    {&add_blocks_kernel<DType::bf16>, kGatherThreads, kReduceScatter},
    {&add_blocks_kernel<DType::fp16>, kGatherThreads, kReduceScatter},
    {&add_blocks_kernel<DType::fp32>, kGatherThreads, kReduceScatter}};

}  // namespace ferry::cuda
