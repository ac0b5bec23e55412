// The calling thread's GPU. device_cuda.cpp implements it; device_none.cpp for builds without CUDA.
#pragma once

#include <cstdint>

#include "arrays/array.hpp"

namespace ferry::python {

bool has_cuda();

// The thread's current device. Throws UnsupportedError without the CUDA backend, a driver or a GPU.
int current_device();

// Whether the stream is being captured into a CUDA graph.
bool is_capturing(void* stream);

struct ByteRange {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

// Enqueues on `stream`, of the current device, a kernel that clears both ranges of device memory.
void clear_on_device(const ByteRange& first, const ByteRange& second, void* stream);

// Makes a GPU current for its lifetime. Does nothing for the host.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device) : DeviceGuard(is_host(device) ? -1 : device.device_id) {}
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  explicit DeviceGuard(int device);  // negative: none

  // Restored on destruction; negative: nothing to restore. Builds without CUDA never use it.
  [[maybe_unused]] int previous_ = -1;
};

}  // namespace ferry::python
