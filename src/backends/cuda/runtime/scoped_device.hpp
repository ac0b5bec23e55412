// The current device of CUDA, for a scope. Stands apart from streams and events, so that tests can compile
// code that needs no more of CUDA for the host.
#pragma once

#include <cuda_runtime_api.h>

namespace ferry::cuda {

// Makes `device` current while the object lives, then restores the previous one. Ignores errors, so that
// destructors can use it.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) noexcept {
    cudaGetDevice(&previous_);
    cudaSetDevice(device);
  }
  ~ScopedDevice() { cudaSetDevice(previous_); }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace ferry::cuda
