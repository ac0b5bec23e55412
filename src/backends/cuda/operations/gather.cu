#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/operations/gather.cuh"

#include "backends/cuda/device/shared_copy.cuh"

namespace ferry::cuda {
namespace {

__global__ void __launch_bounds__(kGatherThreads, 1)
    all_gather_kernel(const __grid_constant__ GatherArguments arguments) {
  __shared__ GatherArguments call;
  __shared__ GatherState state;
  copy_to_shared(arguments, &call, threadIdx.x, kGatherThreads);
  __syncthreads();
  all_gather(call, &state);
}

template <DType kType>
__global__ void __launch_bounds__(kGatherThreads, 1)
    reduce_scatter_kernel(const __grid_constant__ GatherArguments arguments) {
  __shared__ GatherArguments call;
  __shared__ GatherState state;
  copy_to_shared(arguments, &call, threadIdx.x, kGatherThreads);
  __syncthreads();
  reduce_scatter<kType>(call, &state);
}

template <DType kType>
__global__ void __launch_bounds__(kGatherThreads, 1)
    add_blocks_kernel(const __grid_constant__ AddedBlocks call) {
  add_blocks<kType>(call);
}

constexpr const char* kReduceScatter = "launch reduce_scatter_v";

}  // namespace

const Kernel<GatherArguments> kAllGatherKernel{&all_gather_kernel, kGatherThreads, "launch all_gather_v"};
const Kernel<GatherArguments> kReduceScatterKernels[3] = {
    {&reduce_scatter_kernel<DType::bf16>, kGatherThreads, kReduceScatter},
    {&reduce_scatter_kernel<DType::fp16>, kGatherThreads, kReduceScatter},
    {&reduce_scatter_kernel<DType::fp32>, kGatherThreads, kReduceScatter}};
const Kernel<AddedBlocks> kAddBlocksKernels[3] = {
    {&add_blocks_kernel<DType::bf16>, kGatherThreads, kReduceScatter},
    {&add_blocks_kernel<DType::fp16>, kGatherThreads, kReduceScatter},
    {&add_blocks_kernel<DType::fp32>, kGatherThreads, kReduceScatter}};

}  // namespace ferry::cuda
