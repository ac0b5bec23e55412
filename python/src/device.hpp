// The calling thread's GPU, and events on its streams. device_cuda.cpp implements it; device_none.cpp for
// builds without CUDA.
#pragma once

#include <cstdint>
#include <utility>

#include "arrays/array.hpp"

namespace ferry::python {

bool has_cuda();

// The thread's current device. Throws UnsupportedError without the CUDA backend, a driver or a GPU.
int current_device();

// True while the stream is being captured into a CUDA graph.
bool is_capturing(void* stream);

struct DeviceRange {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

// Enqueues on `stream`, of the current device, a kernel that clears both ranges of device memory.
void clear_on_device(const DeviceRange& first, const DeviceRange& second, void* stream);

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

// A point in the work of a stream, without a time. Destroyed events are used again, because making one takes
// as long as a launch.
class StreamEvent {
 public:
  StreamEvent() = default;  // not recorded: nothing to wait for
  ~StreamEvent();
  StreamEvent(StreamEvent&& other) noexcept
      : event_(std::exchange(other.event_, nullptr)), device_(other.device_) {}
  StreamEvent& operator=(StreamEvent&&) = delete;

  // The point is the end of the work enqueued on `stream`, a stream of GPU `device`, so far.
  void record(Stream stream, Device device);
  // Makes later work of `stream` wait for it.
  void make_wait(Stream stream) const;

  bool recorded() const { return event_ != nullptr; }
  Device device() const { return device_; }

 private:
  void* event_ = nullptr;
  Device device_ = kHost;
};

}  // namespace ferry::python
