// A stream of the tests' own, gone with its object.
#pragma once

#include <cuda_runtime_api.h>

#include "ferry/types.hpp"
#include "harness/require_success.hpp"

namespace ferry::contract {

class OwnStream {
 public:
  OwnStream() {
    device::require_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }
  void wait() const { device::require_success(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace ferry::contract
