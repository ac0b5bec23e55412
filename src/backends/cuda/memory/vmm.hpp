// Device memory by the driver's virtual memory management: what is allocated, and where it is mapped.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "memory/file_descriptor.hpp"

namespace ferry::cuda {

// Physical memory of one device, without an address. Freed when the last allocation object and the last
// mapping of it are gone, in whichever processes they are.
class Allocation {
 public:
  // Sizes on a device are multiples of this. UnsupportedError where the device lacks what is needed.
  static std::int64_t granularity(int device, bool shared);

  // `bytes`: a multiple of the granularity. `shared`: can be given to other processes. SystemError.
  static Allocation on_device(int device, std::int64_t bytes, bool shared);

  // What a rank, of another process or of this one, has given as `descriptor`. SystemError.
  static Allocation of_rank(int rank, const Descriptor& descriptor);

  ~Allocation();
  Allocation(Allocation&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Allocation& operator=(Allocation&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  // A file that stands for the memory and keeps it while it is open. SystemError.
  Descriptor descriptor() const;

  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  explicit Allocation(CUmemGenericAllocationHandle handle) : handle_(handle) {}

  CUmemGenericAllocationHandle handle_;
};

// One mapping of an allocation, read and written by some devices of this process. It keeps the memory by
// itself. Whoever lets it go has seen to it that no kernel uses the addresses any more.
class DeviceMapping {
 public:
  // `bytes`: the allocation's size. SystemError; UnsupportedError where a device cannot reach the memory.
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
