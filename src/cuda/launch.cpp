#include "cuda/launch.hpp"

#include "cuda/error.hpp"

namespace ferry::cuda {

void launch(const void* kernel, void* arguments, int threads, std::size_t shared_bytes,
            const LaunchShape& shape, cudaStream_t stream, const char* doing) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)),
        doing);
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = shape.cooperative ? 1 : 0;
  check(cudaLaunchKernelExC(&config, kernel, &arguments), doing);
}

}  // namespace ferry::cuda
