// For builds without the CUDA backend.
#include "device.hpp"
#include "exchange/backend.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

bool has_cuda() {
  return false;
}

int current_device() {
  throw UnsupportedError(kNoCudaBackend);
}

bool is_capturing(void*) {
  return false;
}

void clear_on_device(const DeviceRange&, const DeviceRange&, void*) {}

DeviceGuard::DeviceGuard(int) {}
DeviceGuard::~DeviceGuard() {}

// There are no streams to record events on.
StreamEvent::~StreamEvent() {}
void StreamEvent::record(Stream, Device) {}
void StreamEvent::make_wait(Stream) const {}

}  // namespace ferry::python
