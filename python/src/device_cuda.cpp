#include <cuda_runtime_api.h>

#include "backends/cuda/device/clear.hpp"
#include "backends/cuda/host/error.hpp"
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

void clear_on_device(const Memory& first, const Memory& second, void* stream) {
  cuda::clear({first.data, first.bytes}, {second.data, second.bytes}, static_cast<cudaStream_t>(stream));
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
