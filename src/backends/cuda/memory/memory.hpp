// Memory of one rank alone: on its device, and on the host where the device reaches it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace ferry::cuda {

// Zeroes memory of the current device and returns when that is done, without waiting for what runs in other
// streams. SystemError.
void zero(void* memory, std::int64_t bytes);

// Zero at first, aligned to 256 bytes, on the device that is current in the constructor; freed there whatever
// device is current then. Freeing waits for all that runs on the device. No bytes: a null pointer.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::int64_t bytes);  // SystemError; UnsupportedError where there is no GPU
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  int device() const { return device_; }

 private:
  void swap(DeviceMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(device_, other.device_);
  }

  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  int device_ = -1;
};

// Host memory that stays in place and that every device of the process reaches by the same pointer; zero at
// first, aligned to a page. Freeing may wait for all that runs on the devices. No bytes: a null pointer.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(std::int64_t bytes);  // SystemError; UnsupportedError where there is no GPU
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept { swap(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  void swap(PinnedMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace ferry::cuda
