// A CUDA stream that tests create and destroy with a C++ object.
#pragma once

#include "backends/cuda/host/cuda_stream.hpp"

namespace ferry::contract {

// A stream of the current device that does not synchronise with the default stream.
class TestStream {
 public:
  TestStream() {
    device::require_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~TestStream() { cudaStreamDestroy(stream_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;

  cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }
  void synchronize() const {
    device::require_success(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace ferry::contract
