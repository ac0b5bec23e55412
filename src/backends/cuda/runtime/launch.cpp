#include "backends/cuda/runtime/launch.hpp"

#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

void allow_shared_bytes(const void* kernel, std::int64_t bytes) {
  int device = 0, available = 0;
  check(cudaGetDevice(&device), "find the current device");
  check(cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "query a device's shared memory");
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "query a kernel's attributes");
  available -= static_cast<int>(attributes.sharedSizeBytes);
  if (bytes > available) {
    throw UnsupportedError(str("a block needs ", counted(bytes, "byte"),
                               " of shared memory for the tables of all experts and ranks; this GPU has ",
                               available, ": configure fewer experts or ranks"));
  }
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, available),
        "raise a kernel's shared memory limit");
}

void load_kernel(const void* kernel) {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "load a kernel");
}

void launch(const LaunchedKernel& kernel, const void* arguments, const LaunchShape& shape,
            cudaStream_t stream) {
  cudaLaunchAttribute attribute[2]{};
  unsigned attributes = 0;
  if (shape.cooperative) {
    attribute[attributes].id = cudaLaunchAttributeCooperative;
    attribute[attributes++].val.cooperative = 1;
  }
  if (shape.cluster) {
    attribute[attributes].id = cudaLaunchAttributeClusterDimension;
    attribute[attributes++].val.clusterDim = {static_cast<unsigned>(shape.blocks), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = attributes;
  void* parameter = const_cast<void*>(arguments);
  check(cudaLaunchKernelExC(&config, kernel.handle, &parameter), kernel.action);
}

}  // namespace ferry::cuda
