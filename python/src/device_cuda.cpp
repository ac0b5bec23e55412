#include <cuda_runtime_api.h>

#include "cuda/error.hpp"
#include "device.hpp"

namespace ferry::python {

bool has_cuda() {
  return true;
}

int current_device() {
  int device = 0;
  cuda::check(cudaGetDevice(&device), "find the current device");
  return device;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "look at a stream");
  return status != cudaStreamCaptureStatusNone;
}

void clear_on_device(void* memory, std::int64_t bytes, void* stream) {
  cuda::check(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream)),
              "clear memory");
}

OnDevice::OnDevice(int device) {
  if (device < 0) return;
  const int current = current_device();
  if (current == device) return;
  cuda::check(cudaSetDevice(device), "make a device current");
  before_ = current;
}

OnDevice::~OnDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

}  // namespace ferry::python
