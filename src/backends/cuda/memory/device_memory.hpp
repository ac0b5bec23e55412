// Memory of devices: physical allocations and their mappings (CUDA's virtual memory management), and the
// private memory of one rank, on its device and pinned on the host.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "base/descriptors.hpp"

namespace ferry::cuda {

// Owns physical memory of one device, which has no address until it is mapped. The memory is freed when its
// last allocation object and its last mapping are gone, in all processes.
class Allocation {
 public:
  // Allocation sizes must be a multiple of this, in bytes. Throws UnsupportedError if the device cannot map
  // or share memory.
  static std::int64_t granularity(int device, bool shared);

  // `bytes`: a multiple of the granularity. `shared`: other processes may import it. Throws SystemError.
  static Allocation on_device(int device, std::int64_t bytes, bool shared);

  // Imports the memory that `rank`, in this or another process, has exported. Throws SystemError.
  static Allocation import_from(int rank, const FileDescriptor& descriptor);

  ~Allocation();
  Allocation(Allocation&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Allocation& operator=(Allocation&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  // Exports the memory as a file descriptor, which keeps it alive while open. Throws SystemError.
  FileDescriptor export_descriptor() const;

  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  explicit Allocation(CUmemGenericAllocationHandle handle) : handle_(handle) {}

  CUmemGenericAllocationHandle handle_;
};

// Maps an allocation into the address space of this process, readable and writable by some of its devices.
// Keeps the memory alive. Before it is destroyed, the owner must make sure that no kernel uses the addresses
// any more.
class DeviceMapping {
 public:
  // `bytes`: the allocation's size. Throws SystemError; UnsupportedError if a device cannot access the
  // memory.
  DeviceMapping(const Allocation& allocation, std::int64_t bytes, std::span<const int> devices);
  ~DeviceMapping();
  DeviceMapping(const DeviceMapping&) = delete;
  DeviceMapping& operator=(const DeviceMapping&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }

 private:
  void unmap() noexcept;

  CUdeviceptr address_ = 0;
  std::size_t bytes_;
  bool mapped_ = false;
};

// Zeroes memory of the current device, in copy_stream(), and returns when it is done. Throws
// SystemError.
void zero(void* memory, std::int64_t bytes);

// Zeroed memory, aligned to 256 bytes, on the device that is current at construction. The destructor frees it
// on that device and waits for all work there. A size of 0 gives a null pointer.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::int64_t bytes);  // throws SystemError; UnsupportedError without a GPU
  // Memory that other libraries can map for peers or for a network: an allocation that can be exported.
  // Throws the same, and UnsupportedError too if the device has no virtual memory management.
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
