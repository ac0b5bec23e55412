#include "harness/pinned_heap.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>

#include "harness/require_success.hpp"

namespace ferry::contract::device {
namespace {

constexpr std::int64_t kSlabBytes = 16 << 20;
constexpr std::int64_t kSmallestBytes = 1024;

std::uintptr_t address(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

// Rounds up to a power of two or to 3/4 of one: few sizes, and at most a third is wasted.
std::int64_t size_class(std::int64_t bytes) {
  const auto power = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(bytes)));
  const std::int64_t between = power / 4 * 3;
  return std::max(kSmallestBytes, bytes <= between ? between : power);
}

// The entry whose range [key, key + bytes) contains the address, or end().
template <class Map, class Bytes>
auto find_range(Map& map, std::uintptr_t at, Bytes bytes) {
  auto found = map.upper_bound(at);
  if (found == map.begin()) return map.end();
  --found;
  return at - found->first < static_cast<std::uintptr_t>(bytes(found->second)) ? found : map.end();
}

}  // namespace

std::byte* PinnedHeap::cut_from_slab(std::int64_t bytes) {
  if (bytes > unused_bytes_) {
    Slab slab;
    slab.bytes = std::max(bytes, kSlabBytes);
    void* memory = nullptr;
    require_success(cudaHostAlloc(&memory, static_cast<std::size_t>(slab.bytes),
                                  cudaHostAllocPortable | cudaHostAllocMapped),
                    "cudaHostAlloc");
    slab.data = unused_ = static_cast<std::byte*>(memory);
    unused_bytes_ = slab.bytes;
    slabs_[address(memory)] = slab;
  }
  unused_bytes_ -= bytes;
  return std::exchange(unused_, unused_ + bytes);
}

std::byte* PinnedHeap::allocate(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::int64_t size = size_class(bytes);
  std::vector<std::byte*>& free = free_[size];
  std::byte* block = nullptr;
  if (free.empty()) {
    block = cut_from_slab(size);
  } else {
    block = free.back();
    free.pop_back();
  }
  in_use_[address(block)] = size;
  return block;
}

void PinnedHeap::release(std::byte* block) {
  const std::lock_guard lock(mutex_);
  const auto found = in_use_.find(address(block));
  free_[found->second].push_back(block);
  in_use_.erase(found);
}

std::byte* PinnedHeap::mirror_of(Slab& slab, int device) {
  std::byte*& mirror = slab.mirrors[device];
  if (mirror == nullptr) {
    void* memory = nullptr;
    require_success(cudaMalloc(&memory, static_cast<std::size_t>(slab.bytes)), "cudaMalloc");
    mirror = static_cast<std::byte*>(memory);
    mirrors_[address(mirror)] = &slab;
  }
  return mirror;
}

Block PinnedHeap::block_of(const void* pointer, int device) {
  const std::lock_guard lock(mutex_);
  const auto block = find_range(in_use_, address(pointer), [](std::int64_t bytes) { return bytes; });
  if (block == in_use_.end()) return {};
  auto* host = reinterpret_cast<std::byte*>(block->first);
  if (!with_mirrors_) return {.host = host, .bytes = block->second};
  Slab& slab = find_range(slabs_, block->first, [](const Slab& each) { return each.bytes; })->second;
  return {.host = host, .mirror = mirror_of(slab, device) + (host - slab.data), .bytes = block->second};
}

void* PinnedHeap::host_of(const void* mirror) {
  const std::lock_guard lock(mutex_);
  const auto found = find_range(mirrors_, address(mirror), [](const Slab* slab) { return slab->bytes; });
  if (found == mirrors_.end()) return nullptr;
  return found->second->data + (address(mirror) - found->first);
}

}  // namespace ferry::contract::device
