#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/clear.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "device.hpp"

namespace ferry::python {

bool has_cuda() {
  return true;
}

int current_device() {
  int device = 0;
  cuda::check(cudaGetDevice(&device), "get the current device");
  return device;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status),
              "query the capture state of a stream");
  return status != cudaStreamCaptureStatusNone;
}

void clear_on_device(const ByteRange& first, const ByteRange& second, void* stream) {
  cuda::clear({first.data, first.bytes}, {second.data, second.bytes}, static_cast<cudaStream_t>(stream));
}

DeviceGuard::DeviceGuard(int device) {
  if (device < 0) return;
  const int current = current_device();
  if (current == device) return;
  cuda::check(cudaSetDevice(device), "set the current device");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace ferry::python
