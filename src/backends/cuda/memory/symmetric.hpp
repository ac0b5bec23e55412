// Symmetric device memory: a region of the same size on every rank's device, accessible by all ranks of the
// host.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/cuda/memory/device_memory.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

// Regions are zeroed at first. A rank's device is the one current in the constructing thread; ranks may share
// a device.
// - Ranks that are threads share one mapping of each region, at the same address. It lives until the last
//   rank destroys its object.
// - Ranks that are processes each map every region. The memory lives until the last process unmaps it or
//   ends, so peers can still access the region of a dead rank.
//
// Before it destroys the object, a rank must wait for its own kernels, whose addresses become invalid.
// Kernels of peers may still write to this rank's region.
class DeviceSymmetricMemory {
 public:
  // Collective. If it fails on one rank, it throws that rank's error on all of them.
  // @throws UsageError        the ranks request different sizes
  // @throws UnsupportedError  no driver, no device, or a device cannot access a peer's
  // @throws SystemError       any other error of CUDA or the system
  DeviceSymmetricMemory(const Rank& rank, std::int64_t bytes);

  std::byte* at(int rank, std::int64_t offset) const { return regions_[rank]->data() + offset; }
  std::byte* mine(std::int64_t offset) const { return at(rank_, offset); }
  std::int64_t bytes() const { return bytes_; }
  // Physical size of a region: `bytes` rounded up to the allocation granularity of all devices.
  std::int64_t mapped_bytes() const { return mapped_bytes_; }

  // The rank's device as this process numbers it, or -1 if it is not visible here.
  int device_of(int rank) const { return devices_[rank]; }
  int ranks_on_my_device() const { return ranks_on_my_device_; }  // this rank included

 private:
  struct DeviceInfo;

  void gather_devices(const Rank& rank);
  void check_access(const std::vector<DeviceInfo>& infos) const;
  void share_with_threads(const Rank& rank);
  void share_with_processes(const Rank& rank);

  int rank_;
  std::int64_t bytes_;
  std::int64_t mapped_bytes_ = 0;
  std::vector<int> devices_;  // [ranks]
  int ranks_on_my_device_ = 0;
  std::vector<std::shared_ptr<DeviceMapping>> regions_;  // [ranks]
};

// The UUID of the device that is current.
std::array<std::byte, 16> id_of_current_device();

// Collective. How many ranks have the device that is current here, this rank included.
int ranks_on_current_device(const Rank& rank);

}  // namespace ferry::cuda
