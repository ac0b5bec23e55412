// Access to the machine's GPUs for tests of device backends. device_cuda.cpp implements it; in a build
// without CUDA, device_none.cpp reports that there is none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ferry/types.hpp"

namespace ferry::contract::device {

// Whether this build has a device backend.
bool is_built();

// GPUs of this machine. As skip_reason(), it does not ask the driver.
int count();

// Why tests on devices cannot run here; empty if they can. Looks at /dev instead of asking the driver,
// because a process that has started the driver can no longer fork ranks.
std::string skip_reason();

// Whether this process has started the driver.
bool driver_started();

// Makes the calling thread a rank that works on a device: its current device becomes that of `local_rank`,
// and GuardedBuffers created while the scope exists use allocate().
class RankScope {
 public:
  explicit RankScope(int local_rank);
  ~RankScope();
  RankScope(const RankScope&) = delete;
  RankScope& operator=(const RankScope&) = delete;
};

// Whether any RankScope exists in this process.
bool rank_is_active();

// The calling thread's stream on the device of `local_rank`, which becomes the thread's current device.
Stream stream(int local_rank);

// Makes the calling thread's stream on the device of `local_rank` and copies 8 bytes on it. Allocates device
// memory: call it only while no kernel waits for this rank.
void make_stream(int local_rank);

// Gives the calling thread another one in the same way, and returns it.
Stream new_stream(int local_rank);

// Blocks until the work enqueued so far is done.
void wait(Stream stream);

// Enqueues a host function that sleeps.
void delay(Stream stream, std::int64_t microseconds);

// Pinned host memory that kernels access at the same address.
std::byte* allocate(std::int64_t bytes);
void release(std::byte* block);

// FERRY_TEST_MEMORY: with "pinned" (the default) calls use allocate()'s blocks directly; with "device" they
// use mirrors of them in device memory (device_mirror.hpp).
std::string memory_kind();

// A block from allocate().
struct Block {
  std::byte* host = nullptr;
  std::byte* mirror = nullptr;  // in memory of the current device; null if calls use `host`
  std::int64_t bytes = 0;       // 0: no block
};

// The block that a host pointer points into, if any.
Block block_of(const void* pointer);

// The host address that corresponds to a pointer into a mirror; null for any other pointer.
void* host_of(const void* pointer);

bool in_device_memory(const void* pointer);

// Synchronous.
void copy(void* to, const void* from, std::int64_t bytes);

// Allocated bytes of the current device's memory, by any process.
std::int64_t memory_in_use();

}  // namespace ferry::contract::device
