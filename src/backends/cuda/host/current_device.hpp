// The thread's current device.
#pragma once

#include <cuda_runtime_api.h>

namespace ferry::cuda {

// Makes a device current while it lives; for destructors, so it says nothing about errors.
class OnDevice {
 public:
  explicit OnDevice(int device) noexcept {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace ferry::cuda
