// Device memory through CUDA's virtual memory management: physical allocations and their mappings.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
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

}  // namespace ferry::cuda
