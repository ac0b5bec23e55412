#include "backends/cuda/host/blocking_copy.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/host/error.hpp"

namespace ferry::cuda {
namespace {

struct ServiceStream {
  cudaStream_t stream = nullptr;

  ServiceStream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream"); }
  ~ServiceStream() { cudaStreamDestroy(stream); }
  ServiceStream(const ServiceStream&) = delete;
  ServiceStream& operator=(const ServiceStream&) = delete;
};

}  // namespace

void copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0) return;
  const ServiceStream service;
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, service.stream),
        "copy between host and device");
  check(cudaStreamSynchronize(service.stream), "copy between host and device");
}

}  // namespace ferry::cuda
