// A stream of a rank's device, for engines that move device memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace ferry {

// One thread at a time.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;

  virtual void* handle() const = 0;  // a cudaStream_t

  // Memory of the device, of at least `bytes`, kept until the next call with more.
  virtual std::byte* memory(std::int64_t bytes) = 0;
  // Enqueues a copy between host and device, in either direction.
  virtual void copy(void* to, const void* from, std::int64_t bytes) = 0;
  // Blocks until all enqueued work is done. Calls `check`, which may throw, at least every 10 ms.
  virtual void wait(const std::function<void()>& check) = 0;
};

using DeviceId = std::array<std::byte, 16>;  // identifies a GPU in all processes and on all hosts

class Communicator;

// What an engine calls to use a rank's device.
struct DeviceAccess {
  DeviceId id;
  std::function<std::unique_ptr<DeviceStream>()> make_stream;
  // Makes the device current in the calling thread. Null: nothing needs to be done.
  std::function<void()> select = nullptr;
  // Collective over ranks that are all on one host: makes a communicator for their host memory. It may hold
  // the rank. Null: host memory travels as device memory does.
  std::function<std::unique_ptr<Communicator>()> make_host_link = nullptr;
};

}  // namespace ferry
