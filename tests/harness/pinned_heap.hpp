// Allocates blocks of pinned host memory, with optional mirrors in device memory. Pinning is slow, so blocks
// are cut from slabs that live until the process ends, and freed blocks are reused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "harness/device.hpp"

namespace ferry::contract::device {

class PinnedHeap {
 public:
  explicit PinnedHeap(bool with_mirrors) : with_mirrors_(with_mirrors) {}

  std::byte* allocate(std::int64_t bytes);
  void release(std::byte* block);

  // Creates the mirror on `device` if there is none yet.
  Block block_of(const void* pointer, int device);
  void* host_of(const void* mirror);

 private:
  using Address = std::uintptr_t;
  struct Slab {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    std::map<int, std::byte*> mirrors;  // by device
  };

  std::byte* cut_from_slab(std::int64_t bytes);
  std::byte* mirror_of(Slab& slab, int device);

  const bool with_mirrors_;
  std::mutex mutex_;
  std::map<Address, Slab> slabs_;
  std::map<Address, const Slab*> mirrors_;                // by address of the mirror
  std::map<Address, std::int64_t> in_use_;                // sizes of allocated blocks
  std::map<std::int64_t, std::vector<std::byte*>> free_;  // by size
  std::byte* unused_ = nullptr;                           // end of the newest slab
  std::int64_t unused_bytes_ = 0;
};

}  // namespace ferry::contract::device
