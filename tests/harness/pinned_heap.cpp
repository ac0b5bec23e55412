#include "harness/pinned_heap.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>

#include "harness/require_success.hpp"

namespace ferry::contract::device {
namespace {

constexpr std::int64_t kSlab = 16 << 20;
constexpr std::int64_t kSmallest = 1024;

std::uintptr_t address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

// Powers of two and what lies in the middle between them: few sizes, little waste.
std::int64_t size_class(std::int64_t bytes) {
  const auto power = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(bytes)));
  const std::int64_t between = power / 4 * 3;
  return std::max(kSmallest, bytes <= between ? between : power);
}

// The entry whose range [key, key + bytes) holds the address, or end().
template <class Map, class Bytes>
auto find_range(Map& map, std::uintptr_t at, Bytes bytes) {
  auto found = map.upper_bound(at);
  if (found == map.begin()) return map.end();
  --found;
  return at - found->first < static_cast<std::uintptr_t>(bytes(found->second)) ? found : map.end();
}

}  // namespace

std::byte* Heap::carve(std::int64_t bytes) {
  if (bytes > rest_bytes_) {
    Slab slab;
    slab.bytes = std::max(bytes, kSlab);
    void* memory = nullptr;
    require_success(cudaHostAlloc(&memory, static_cast<std::size_t>(slab.bytes),
                                  cudaHostAllocPortable | cudaHostAllocMapped),
                    "cudaHostAlloc");
    slab.data = rest_ = static_cast<std::byte*>(memory);
    rest_bytes_ = slab.bytes;
    slabs_[address(memory)] = slab;
  }
  rest_bytes_ -= bytes;
  return std::exchange(rest_, rest_ + bytes);
}

std::byte* Heap::take(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::int64_t size = size_class(bytes);
  std::vector<std::byte*>& free = free_[size];
  std::byte* block = nullptr;
  if (free.empty()) {
    block = carve(size);
  } else {
    block = free.back();
    free.pop_back();
  }
  taken_[address(block)] = size;
  return block;
}

void Heap::give_back(std::byte* block) {
  const std::lock_guard lock(mutex_);
  const auto taken = taken_.find(address(block));
  free_[taken->second].push_back(block);
  taken_.erase(taken);
}

std::byte* Heap::twin_of(Slab& slab, int device) {
  std::byte*& twin = slab.twins[device];
  if (twin == nullptr) {
    void* memory = nullptr;
    require_success(cudaMalloc(&memory, static_cast<std::size_t>(slab.bytes)), "cudaMalloc");
    twin = static_cast<std::byte*>(memory);
    twins_[address(twin)] = &slab;
  }
  return twin;
}

Block Heap::block_of(const void* pointer, int device) {
  const std::lock_guard lock(mutex_);
  const auto block = find_range(taken_, address(pointer), [](std::int64_t bytes) { return bytes; });
  if (block == taken_.end()) return {};
  auto* host = reinterpret_cast<std::byte*>(block->first);
  if (!with_twins_) return {.host = host, .bytes = block->second};
  Slab& slab = find_range(slabs_, block->first, [](const Slab& each) { return each.bytes; })->second;
  return {.host = host, .twin = twin_of(slab, device) + (host - slab.data), .bytes = block->second};
}

void* Heap::host_of(const void* twin) {
  const std::lock_guard lock(mutex_);
  const auto found = find_range(twins_, address(twin), [](const Slab* slab) { return slab->bytes; });
  if (found == twins_.end()) return nullptr;
  return found->second->data + (address(twin) - found->first);
}

}  // namespace ferry::contract::device
