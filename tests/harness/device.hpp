// The machine's devices, as tests of a device backend use them. A build without device code has none:
// device_none.cpp stands in for device_cuda.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ferry/types.hpp"

namespace ferry::contract::device {

// Whether this build has a device backend.
bool built();

// Why its tests cannot run here; empty: they can. Asks the file system and not the driver, because a process
// that has started the driver cannot fork ranks any more.
std::string why_not();

// Whether this process has started the driver.
bool started();

// While one lives, a rank of this process works on a device: its thread's current device is that of
// `local_rank`, and Buffers made meanwhile lie in the memory below.
class Work {
 public:
  explicit Work(int local_rank);
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
};
bool at_work();

// A stream of the calling thread on the device of `local_rank`, which becomes the thread's current one.
Stream stream(int local_rank);

// Lets the stream pause a little before what follows.
void stall(Stream stream, std::int64_t microseconds);

// Pinned host memory that kernels reach at the same address.
std::byte* allocate(std::int64_t bytes);
void release(std::byte* block);

// FERRY_TEST_MEMORY: "pinned" (or not set) hands blocks to calls as they are; "device" hands over a twin in
// the memory of the thread's device, filled before the call and read back after it.
std::string memory_name();

// What allocate() gave out, whole.
struct Block {
  std::byte* host = nullptr;
  std::byte* twin = nullptr;  // null: calls use `host`
  std::int64_t bytes = 0;
};

// The block that a pointer of the host points into; no bytes: none.
Block block_of(const void* pointer);

// The host's pointer for one into a twin; null if it is none.
void* host_of(const void* pointer);

bool in_device_memory(const void* pointer);

// Returns when it is done.
void copy(void* to, const void* from, std::int64_t bytes);

// Bytes of the current device's memory that somebody holds.
std::int64_t bytes_held();

}  // namespace ferry::contract::device
