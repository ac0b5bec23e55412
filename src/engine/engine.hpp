// Engines: transports that exist outside Ferry (MPI, NCCL, the caller's functions), as the backend
// `collective` uses them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/transfer_thread.hpp"
#include "ferry/engine.hpp"
#include "ferry/types.hpp"
#include "group/rank_state.hpp"

namespace ferry {

// A stream of a rank's device, for engines that move device memory. One thread at a time.
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

// The bytes that a rank sends to and receives from every rank. All lists have one entry for each rank, in
// bytes; this rank's own byte counts are 0.
struct AllToAllV {
  const std::byte* send;
  std::span<const std::int64_t> send_bytes, send_offsets;
  std::byte* receive;
  std::span<const std::int64_t> receive_bytes, receive_offsets;
  // Both buffers are memory of the rank's CUDA device: finished before the transfer, and read after it.
  bool device = false;
};

// One lane's connection to the same lane of all ranks. One thread at a time uses it. It may outlive its
// engine.
class Communicator {
 public:
  virtual ~Communicator() = default;

  // Collective. Blocks until this rank's part of the transfer is done.
  //
  // While it waits, it calls `check` at least every 10 ms. `check` throws to give up: the deadline has passed
  // or a peer is lost. After any exception the communicator is failed: every later call throws the same
  // exception. The transport may then still write, so the communicator never releases `keep`, which owns all
  // memory of `transfer`.
  virtual void all_to_all_v(const AllToAllV& transfer, const std::shared_ptr<void>& keep,
                            const std::function<void()>& check) = 0;

  // Whether all_to_all_v() returns soon after `check` throws, whatever the peers do, so that a caller's own
  // thread may run it.
  virtual bool gives_up_at_once() const { return false; }

  // Bytes of the first transfer of a call where lanes are ordered; the same for all communicators of an
  // engine. Enough for the counts of some hundred experts and ranks. No block is smaller, so in groups of a
  // thousand ranks these bytes take much memory.
  static constexpr std::int64_t kFirstBytes = 3072;
  virtual std::int64_t first_bytes() const { return kFirstBytes; }

  // Announces memory of the rank's device that transfers will use, to a transport that gains by it. All ranks
  // do so for the memory of a transfer, or none. The registration ends with the returned object; end it
  // before the memory is freed. Null: not registered.
  virtual std::shared_ptr<void> register_memory(std::byte*, std::int64_t) { return nullptr; }
};

// The transport of one rank.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual EngineKind kind() const = 0;

  // Whether calls of different lanes must be made one at a time and in the same order on all ranks.
  virtual bool ordered_lanes() const = 0;

  // Whether transfers may be of device memory. Transfers of host memory always may.
  virtual bool takes_device_memory() const { return false; }

  // Collective: every rank calls it with the same number, and in the same order. Returns a communicator for
  // each lane of one exchange. Throws UnsupportedError if the engine cannot be used here.
  virtual std::vector<std::unique_ptr<Communicator>> communicators(int lanes) = 0;

  // The thread of all lanes of an engine with ordered lanes: their transfers start in the order of the
  // caller's calls. Started at the first use. One thread at a time.
  const std::shared_ptr<TransferThread>& transfer_thread() {
    if (!transfer_thread_) transfer_thread_ = std::make_shared<TransferThread>();
    return transfer_thread_;
  }

 private:
  std::shared_ptr<TransferThread> transfer_thread_;
};

// The engine `mpi`, whose transfers use open_mpi(). Collective over all processes of the MPI job, with the
// errors of open_mpi().
std::shared_ptr<Engine> make_mpi_engine();

// The engine `custom`: the caller's functions. Throws UsageError if all_to_all_v is missing.
std::shared_ptr<Engine> make_custom_engine(EngineFunctions functions);

// The rank's engine `nccl`: made by the first call, and kept as long as the rank. All exchanges of a group
// share a communicator, so that calls in different order meet in it. `deadline`: seconds for making it.
// `device`: that of the exchange under construction.
//
// communicators() throws UnsupportedError on all ranks if one of them has no NCCL, or if two share a device,
// which NCCL does not allow; TimeoutError or PeerLostError if a rank does not come. Transfers of host memory
// go through `device`'s link of the host, if it has one and all ranks are on one host, else through the
// device. The end of the last lane that uses the communicator waits up to half the deadline for the other
// ranks to end theirs.
Engine& nccl_engine_of(RankState& rank, double deadline, DeviceAccess device);

// A new engine. `rank` outlives it and its communicators.
std::shared_ptr<Engine> make_nccl_engine(RankState& rank, double deadline, DeviceAccess device);

}  // namespace ferry
