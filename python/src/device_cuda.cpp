#include <cuda_runtime_api.h>

#include <map>
#include <vector>

#include "backends/cuda/operations/memory_kernels.hpp"
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

void clear_on_device(const DeviceRange& first, const DeviceRange& second, void* stream) {
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

namespace {

// Events of each device that no StreamEvent holds. The GIL guards them. Never destroyed: at the end of the
// process the driver may be gone before static objects are.
std::vector<cudaEvent_t>& unused_events(int device) {
  static auto& events = *new std::map<int, std::vector<cudaEvent_t>>;
  return events[device];
}

cudaEvent_t take_event(Device device) {
  std::vector<cudaEvent_t>& unused = unused_events(device.device_id);
  if (!unused.empty()) {
    cudaEvent_t const event = unused.back();
    unused.pop_back();
    return event;
  }
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create an event");
  return event;
}

}  // namespace

StreamEvent::~StreamEvent() {
  if (event_ != nullptr) unused_events(device_.device_id).push_back(static_cast<cudaEvent_t>(event_));
}

void StreamEvent::record(Stream stream, Device device) {
  if (event_ == nullptr) {
    event_ = take_event(device);
    device_ = device;
  }
  const DeviceGuard guard(device_);  // the default stream is the current device's
  cuda::check(cudaEventRecord(static_cast<cudaEvent_t>(event_), static_cast<cudaStream_t>(stream.handle)),
              "record an event");
}

void StreamEvent::make_wait(Stream stream) const {
  if (event_ == nullptr) return;
  const DeviceGuard guard(device_);
  cuda::check(
      cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), static_cast<cudaEvent_t>(event_), 0),
      "make a stream wait for an event");
}

}  // namespace ferry::python
