#include "backends/cuda/combine/epilogue.cuh"

#include <algorithm>

#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {
namespace {

template <DType kType>
__global__ void __launch_bounds__(kEpilogueThreads)
    epilogue_kernel(const __grid_constant__ EpilogueArguments call) {
  run_epilogue<kType>(call);
}

const void* epilogue_of(DType type) {
  switch (type) {
    case DType::bf16:
      return reinterpret_cast<const void*>(&epilogue_kernel<DType::bf16>);
    case DType::fp16:
      return reinterpret_cast<const void*>(&epilogue_kernel<DType::fp16>);
    case DType::fp32:
      break;
  }
  return reinterpret_cast<const void*>(&epilogue_kernel<DType::fp32>);
}

}  // namespace

void prepare_epilogue() {
  load_kernels(&epilogue_kernel<DType::bf16>, &epilogue_kernel<DType::fp16>, &epilogue_kernel<DType::fp32>);
}

void launch_epilogue(const EpilogueArguments& arguments, int blocks, cudaStream_t stream) {
  const int needed = std::clamp(static_cast<int>(arguments.lane.max_tokens), 1, blocks);
  launch(epilogue_of(arguments.type), const_cast<EpilogueArguments*>(&arguments), kEpilogueThreads, 0,
         {.blocks = needed}, stream, "launch the epilogue of a combine");
}

}  // namespace ferry::cuda
