// An owned CUDA stream: the one wrapper for the library, the tools and the tests.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/error.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {

// A stream of the device that is current at construction. It is non-blocking: it does not wait for the
// default stream, where a peer's kernel on the same device may be waiting for this rank.
class CudaStream {
 public:
  CudaStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream"); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }

  // Blocks until the work enqueued so far is done.
  void synchronize() const { check(cudaStreamSynchronize(stream_), "wait for a stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace ferry::cuda
