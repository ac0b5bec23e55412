// The calling thread's GPU.
#pragma once

#include <cstdint>

namespace ferry::python {

bool has_cuda();

// The thread's current device; UnsupportedError without the backend, a driver or a GPU.
int current_device();

// Whether calls on the stream are being captured into a graph.
bool is_capturing(void* stream);

struct Memory {
  void* data = nullptr;
  std::int64_t bytes = 0;
};

// In order on a stream of the device that is current. Host memory is not for it.
void clear_on_device(const Memory& first, const Memory& second, void* stream);

// Makes a device current for a call. Negative: leaves everything alone.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;  // to be made current again
};

}  // namespace ferry::python
