// What a lane of the CUDA backend owns on one rank, and the calls in flight on it.
#pragma once

#include <optional>

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/device/small_operations.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/memory/memory.hpp"
#include "backends/cuda/memory/sizes.hpp"
#include "backends/cuda/memory/symmetric.hpp"
#include "exchange/backend.hpp"

namespace ferry::cuda {

// What all lanes of an exchange share. Read only after construction.
struct Shared {
  Shared(const Rank& rank, const Config& config);

  Rank rank;
  Config config;
  int device;
  DeviceSymmetricMemory memory;
  ExchangeArrays arrays;
  DeviceMemory tables;
  PinnedMemory report_memory;
  int blocks;  // that may wait for one another at once: this rank's part of the device

  int me() const { return rank.index(); }
  HostReport* report() const { return reinterpret_cast<HostReport*>(report_memory.data()); }
};

class Lane {
 public:
  Lane(const Shared& of_exchange, int number);

  // Each puts one launch on the stream. Errors of the arguments are thrown before anything is launched.
  DispatchResult dispatch(const DispatchCall& call, Phase phase, Stream stream);
  DispatchResult dispatch_receive(Stream stream);
  void combine(const CombineCall& call, Phase phase, Stream stream);
  void combine_receive(Stream stream);
  void route_values(const float* values, const Plan& plan, float* row_values, Stream stream);
  const StepMetadata* metadata(std::int32_t count, const std::int32_t* device_count, Stream stream);
  void refuse(Operation operation, const Error& error, Stream stream);

  // Throws what a call of this lane left for the host, once.
  void raise_device_error();
  CallDiagnostics take_diagnostics();
  // Adds this lane's counts.
  void add_load(std::vector<std::int64_t>& experts, std::int64_t& dispatches) const;
  void add_wire(WireCounts& counts) const;

  // Working memory of this lane on its device: its state, its own arrivals, tables.
  const DeviceMemory& memory() const { return memory_; }

 private:
  template <class T>
  T* array(std::int64_t offset) const {
    return reinterpret_cast<T*>(memory_.data() + offset);
  }
  // Blocks that the next calls with this limit take. 0: the lane's part of the device.
  int blocks_for(int sm_limit) const;
  LaneView make_view() const;
  void fill_tables() const;
  LaunchShape shape(int sm_limit) const;
  DispatchArguments dispatch_arguments(const DispatchCall& call, bool fused) const;
  void set_receive_buffers(const DispatchCall& call, DispatchArguments& arguments);

  const Shared& shared_;
  const int index_;
  const LaneArrays arrays_;
  DeviceMemory memory_;
  PinnedMemory pinned_;
  LaneView view_;

  // Of the call whose send half has been launched.
  DispatchArguments dispatch_{};
  CombineArguments combine_{};
  LaunchShape sent_shape_;
  DispatchResult received_;
  std::uint64_t calls_ = 0;  // put on streams so far
};

}  // namespace ferry::cuda
