#include "backends/cuda/host/launch.hpp"

#include "backends/cuda/host/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

void allow_shared_bytes(const void* kernel, std::int64_t bytes) {
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "find the current device");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "look at shared memory");
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "look at a kernel");
  most -= static_cast<int>(attributes.sharedSizeBytes);
  if (bytes > most) {
    throw UnsupportedError(str("a block needs ", bytes,
                               " bytes of a multiprocessor's shared memory, which has ", most,
                               ": it holds tables of all experts and ranks"));
  }
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "prepare a kernel");
}

void launch(const void* kernel, void* arguments, int threads, std::size_t shared_bytes,
            const LaunchShape& shape, cudaStream_t stream, const char* doing) {
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
