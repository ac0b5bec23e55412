// Private memory of one rank: on its device, and pinned on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "backends/cuda/memory/vmm.hpp"

namespace ferry::cuda {

// Zeroes memory of the current device, in copy_stream(), and returns when it is done. Throws
// SystemError.
void zero(void* memory, std::int64_t bytes);

// Zeroed memory, aligned to 256 bytes, on the device that is current at construction. The destructor frees it
// on that device and waits for all work there. A size of 0 gives a null pointer.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::int64_t bytes);  // throws SystemError; UnsupportedError without a GPU
  // The same, as other libraries need it to map it for peers or for a network: an allocation that can be
  // exported. Throws UnsupportedError too if the device has no virtual memory management.
  static DeviceMemory exportable(std::int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  int device() const { return device_; }
  // Never frees the memory.
  void abandon() noexcept;

 private:
  void swap(DeviceMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(device_, other.device_);
    std::swap(mapping_, other.mapping_);
  }

  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  int device_ = -1;
  std::unique_ptr<DeviceMapping> mapping_;  // of exportable memory
};

// Zeroed, page-aligned host memory that every device of the process accesses by the same pointer. The
// destructor may wait for all work on the devices. A size of 0 gives a null pointer.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(std::int64_t bytes);  // throws SystemError; UnsupportedError without a GPU
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
