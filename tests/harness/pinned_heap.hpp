// Pinned host memory in blocks, and their twins in device memory. Pinning is slow, so blocks come from slabs
// that are kept until the process ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "harness/device.hpp"

namespace ferry::contract::device {

class Heap {
 public:
  explicit Heap(bool with_twins) : with_twins_(with_twins) {}

  std::byte* take(std::int64_t bytes);
  void give_back(std::byte* block);

  // `device` is where a twin is made if there is none yet.
  Block block_of(const void* pointer, int device);
  void* host_of(const void* twin);

 private:
  using Address = std::uintptr_t;
  struct Slab {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
    std::map<int, std::byte*> twins;  // by device
  };

  std::byte* carve(std::int64_t bytes);
  std::byte* twin_of(Slab& slab, int device);

  const bool with_twins_;
  std::mutex mutex_;
  std::map<Address, Slab> slabs_;
  std::map<Address, const Slab*> twins_;                  // by address of the twin
  std::map<Address, std::int64_t> taken_;                 // bytes of blocks in use
  std::map<std::int64_t, std::vector<std::byte*>> free_;  // by size
  std::byte* rest_ = nullptr;                             // of the newest slab
  std::int64_t rest_bytes_ = 0;
};

}  // namespace ferry::contract::device
