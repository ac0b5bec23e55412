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

const void* reduce_scatter_of(DType type) {
  switch (type) {
    case DType::bf16:
      return reinterpret_cast<const void*>(&reduce_scatter_kernel<DType::bf16>);
    case DType::fp16:
      return reinterpret_cast<const void*>(&reduce_scatter_kernel<DType::fp16>);
    case DType::fp32:
      break;
  }
  return reinterpret_cast<const void*>(&reduce_scatter_kernel<DType::fp32>);
}

template <DType kType>
__global__ void __launch_bounds__(kGatherThreads, 1)
    add_blocks_kernel(const __grid_constant__ AddedBlocks call) {
  add_blocks<kType>(call);
}

const void* add_blocks_of(DType type) {
  switch (type) {
    case DType::bf16:
      return reinterpret_cast<const void*>(&add_blocks_kernel<DType::bf16>);
    case DType::fp16:
      return reinterpret_cast<const void*>(&add_blocks_kernel<DType::fp16>);
    case DType::fp32:
      break;
  }
  return reinterpret_cast<const void*>(&add_blocks_kernel<DType::fp32>);
}

}  // namespace

void launch_all_gather(const GatherArguments& arguments, const LaunchShape& shape, cudaStream_t stream) {
  launch(&all_gather_kernel, arguments, kGatherThreads, shape, stream, "launch all_gather_v");
}

void launch_reduce_scatter(const GatherArguments& arguments, DType type, const LaunchShape& shape,
                           cudaStream_t stream) {
  launch(reduce_scatter_of(type), const_cast<GatherArguments*>(&arguments), kGatherThreads, 0, shape, stream,
         "launch reduce_scatter_v");
}

void launch_add_blocks(const AddedBlocks& arguments, DType type, const LaunchShape& shape,
                       cudaStream_t stream) {
  launch(add_blocks_of(type), const_cast<AddedBlocks*>(&arguments), kGatherThreads, 0, shape, stream,
         "launch reduce_scatter_v");
}

}  // namespace ferry::cuda
