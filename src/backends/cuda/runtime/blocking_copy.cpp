#include "backends/cuda/runtime/blocking_copy.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/cuda_stream.hpp"
#include "backends/cuda/runtime/error.hpp"

namespace ferry::cuda {

void copy_blocking(void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0) return;
  const CudaStream stream;
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream.get()),
        "copy between host and device");
  stream.synchronize();
}

}  // namespace ferry::cuda
