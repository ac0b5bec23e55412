// Device memory that every rank has and every rank of the host can write to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/cuda/memory/vmm.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

// Regions of the same size on the devices of all ranks, zero at first, which every rank's device can read and
// write. A rank's device is the one that is current in the thread that constructs; several ranks may have the
// same one. Threads of one process use one mapping of each region, at the same address on all ranks, which
// lives until the last rank lets go. Processes map each region themselves; the memory lives until the last of
// them has unmapped it or ended, so that of a dead rank stays usable.
//
// The owner has synchronised its own kernels before it lets go: the addresses are gone then. Kernels of peers
// are not in danger.
class DeviceSymmetricMemory {
 public:
  // Collective. Every rank asks for the same number of bytes (UsageError otherwise). What one rank cannot do
  // ends the construction on all ranks with its error: SystemError, or UnsupportedError where there is no
  // driver or device, or where one rank's device cannot access that of another (both are named).
  DeviceSymmetricMemory(const Rank& rank, std::int64_t bytes);

  std::byte* at(int rank, std::int64_t offset) const { return regions_[rank]->data() + offset; }
  std::byte* mine(std::int64_t offset) const { return at(rank_, offset); }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t mapped_bytes() const {
    return mapped_bytes_;
  }  // what a region takes: whole pages of the devices

  // The number this process has for the rank's device, or -1 if it is not visible here.
  int device_of(int rank) const { return devices_[rank]; }
  int ranks_on_my_device() const { return ranks_on_my_device_; }  // of this group, this one included

 private:
  struct Card;

  void meet(const Rank& rank);
  void check_access(const std::vector<Card>& cards) const;
  void share_with_threads(const Rank& rank);
  void share_with_processes(const Rank& rank);

  int rank_;
  std::int64_t bytes_;
  std::int64_t mapped_bytes_ = 0;
  std::vector<int> devices_;  // [ranks]
  int ranks_on_my_device_ = 0;
  std::vector<std::shared_ptr<DeviceMapping>> regions_;  // [ranks]
};

}  // namespace ferry::cuda
