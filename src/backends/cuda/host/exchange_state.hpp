// The part of a CUDA exchange that all lanes of a rank share.
#pragma once

#include <memory>
#include <optional>

#include "backends/cuda/host/hop_transport.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/memory/symmetric.hpp"
#include "backends/cuda/protocol/host_signals.hpp"
#include "ferry/config.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

// How the kernels of one rank reach another rank's memory. mapped: directly. engine: they do not; an engine
// carries their messages. hops: they do not either; a launch between the phases carries the messages in two
// hops.
enum class Reach { mapped, engine, hops };

// State of an exchange that all its lanes use. Constant after construction.
struct ExchangeState {
  // Collective. `make_hops`: for Reach::hops.
  ExchangeState(const Rank& rank, const Config& config, Reach reach, const MakeHopTransport& make_hops = {});
  ~ExchangeState();
  ExchangeState(const ExchangeState&) = delete;
  ExchangeState& operator=(const ExchangeState&) = delete;

  Rank rank;
  Config config;
  int device;                                   // current at construction
  std::optional<EngineLayout> engine;           // engine, hops
  std::optional<HopLayout> hops;                // hops: layout of a lane's memory in hop_transport
  std::optional<DeviceSymmetricMemory> memory;  // mapped
  bool registers = false;                       // engine: its memory may be registered with NCCL
  DeviceMemory engine_memory;                   // memory of all lanes
  std::unique_ptr<HopTransport> hop_transport;  // hops; puts from engine_memory
  HopWidth hop_width{};                         // hops: of launches that move messages
  int ranks_on_device;                          // this rank included
  ExchangeArrays arrays;
  DeviceMemory tables;  // ExchangeArrays
  PinnedMemory report_memory;
  int blocks;  // this rank's part of the device: blocks that are certain to be resident at once

  int me() const { return rank.index(); }
  // Whether an engine carries messages. The host then waits for peers within a call.
  bool over_engine() const { return engine && !hops; }
  // Whether a `partial` combine adds the rows of each node first. Where no node has two ranks, it need not:
  // both reduction levels add the same rows in the same order.
  bool has_node_sums() const {
    return config.reduction_level == ReductionLevel::node && rank.topology().nodes() < rank.size();
  }
  // Memory of this device that an engine's transfers may use.
  DeviceMemory memory_for_engine(std::int64_t bytes) const;
  std::byte* engine_lane(int lane) const { return engine_memory.data() + lane * engine->bytes; }
  // Writes what kernels read of the placement and the epoch: the routing tables and the Epoch.
  void write_placement();
  HostSignals* report() const { return reinterpret_cast<HostSignals*>(report_memory.data()); }
};

}  // namespace ferry::cuda
