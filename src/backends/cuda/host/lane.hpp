// A lane of the CUDA backend on one rank: its memory, and the launches of its calls.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "backends/cuda/combine/around_combine.hpp"
#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/combine/packed_rows.hpp"
#include "backends/cuda/dispatch/around_dispatch.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/host/call_pointers.hpp"
#include "backends/cuda/host/diagnostics_reader.hpp"
#include "backends/cuda/host/exchange_state.hpp"
#include "backends/cuda/host/lane_streams.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/operations/dispatch_counts.hpp"
#include "backends/cuda/operations/engine_messages.hpp"
#include "backends/cuda/operations/gather.hpp"
#include "backends/cuda/operations/small_operations.hpp"
#include "exchange/backend.hpp"
#include "exchange/call_options.hpp"

namespace ferry::cuda {

// The options of a call as kernels compare them. The plan's call follows in the kernel, which reads it from
// the plan's header.
AgreedOptions agreed_options_of(Operation operation, const CallOptions& options);

class Lane {
 public:
  Lane(const ExchangeState& exchange, int index);

  // Each function enqueues one launch on the stream, and throws UsageError for bad arguments before that.
  // Over an engine only phases are enqueued; a call counts when its receive phase is enqueued.
  // `keeps_inputs`, of a send phase: its tokens or outputs stay unchanged until the receive phase has run,
  // which then reads this rank's own ones there, as a fused call does.
  DispatchResult dispatch(const DispatchCall& call, Phase phase, Stream stream, bool keeps_inputs = false);
  DispatchResult dispatch_receive(Stream stream);
  void combine(const CombineCall& call, Phase phase, Stream stream, bool keeps_inputs = false);
  void combine_receive(Stream stream);
  // A whole small call, at once or in two hops. After one of dispatch_counts: await_dispatch_counts() waits a
  // while, and returns whether the kernel has ended; counted_dispatch() returns whether the kernel has
  // counted, or was aborted; dispatch_counts() reads the counts.
  SmallResult run(const SmallCall& call, Stream stream);
  bool await_dispatch_counts(Stream stream) const;
  bool counted_dispatch() const;
  DispatchCounts dispatch_counts() const;
  // A phase of a small call.
  SmallResult enqueue(const MetadataCall& call, Phase phase, Stream stream);
  SmallResult enqueue(const RouteValuesCall& call, Phase phase, Stream stream);
  SmallResult enqueue(const DispatchCountsCall& call, Phase phase, Stream stream);
  SmallResult enqueue(const GatherCall& call, Phase phase, Stream stream);
  // The counts in the call headers, which have been exchanged. `header_of`: the header of a rank, in host
  // memory.
  DispatchCounts counts_of_headers(const std::function<const std::byte*(int source)>& header_of);
  // If another rank uses `stream`: runs on a stream of its own, and blocks until all ranks have called.
  void refuse(Operation operation, const Error& error, Stream stream);

  // Throws UsageError if kernels cannot use the pointers.
  void require_usable(const char* operation, const CallPointers& pointers) {
    pointer_check_.require_usable(operation, pointers);
  }

  // Throws the error of an aborted call of this lane, once.
  void raise_device_error();
  CallDiagnostics take_diagnostics();
  // Add this lane's counts to the arguments. `experts`: [experts].
  void add_load(std::vector<std::int64_t>& experts, std::int64_t& dispatches) const;
  void add_wire(WireCounts& counts) const;

  // Over an engine: sets the flags of the messages that have arrived, `from` [R] of them from each rank.
  // Before dispatch_receive().
  void mark_arrived(const std::int32_t* from, Stream stream) const;
  // Over an engine: records where the rows in `from` [R] have arrived. Before combine_receive().
  void find_rows(const ArrivedRows* from, Stream stream) const;
  // Over an engine, in a combine that adds by node: adds the recorded rows. Before combine_receive().
  void add_on_nodes(Stream stream);
  bool adds_by_node() const;
  // Whether the combine under way has packed the rows for this rank itself.
  bool packs_own_rows() const { return combine_.own_staged; }
  // Over an engine: adds `blocks`, one for each rank of a sub-group, of values of `type`.
  void add_blocks(std::span<const void* const> blocks, DType type, void* sums, std::int64_t bytes,
                  Stream stream) const;
  // Over an engine, at a relay: writes the sums of the `rows` for one source rank to `out`, and their number
  // to `count`, in pinned memory.
  void add_for_relay(std::span<const ArrivedRows> rows, std::byte* out, std::int32_t* count,
                     cudaStream_t stream) const;
  // In two hops. These follow the send phase of the same name, or are whole calls of several launches.
  DispatchResult hop_dispatch(const DispatchCall& call, Stream stream);
  DispatchResult hop_dispatch_receive(Stream stream);
  void hop_combine_receive(Stream stream) { hop_rows(false, stream); }
  void hop_combine(const CombineCall& call, Stream stream);
  DispatchCounts hop_dispatch_counts();  // when the stream has executed the call
  void add_hop_wire(WireCounts& counts) const;

  // The memory of the step metadata, on the device.
  StepMetadata* step_metadata() const { return array<StepMetadata>(arrays_.metadata); }
  const LaneView& view() const { return view_; }
  const OwnArrays& own_arrays() const { return own_; }

  // Working memory of this lane on its device (LaneArrays).
  const DeviceMemory& memory() const { return memory_; }

 private:
  template <class T>
  T* array(std::int64_t offset) const {
    return reinterpret_cast<T*>(memory_.data() + offset);
  }
  // Blocks of a launch with this limit; sm_limit 0: the lane's whole part of the device.
  int blocks_for(int sm_limit) const;
  LaneView make_view() const;
  // The lane's own receive buffers.
  std::byte* receive_buffers() const;
  void pack_rows(CombineArguments& arguments, Stream stream) const;
  // Shared experts' rows that combine copies out of the outputs; none if `to` is null.
  struct SharedCopy {
    std::byte* to = nullptr;
    DType type = DType::bf16;
  };
  SharedCopy plan_shared_copy(const CombineCall& call, Phase phase, CombineArguments* arguments) const;
  void copy_shared_rows(const CombineArguments& combine, const SharedCopy& copy, const LaunchShape& shape,
                        Stream stream) const;
  // The epilogue of a combine, applied to the result that `combine` describes. None: there is nothing to do,
  // or, where the result is its residual, the kernels of the combine do it, and `combine` says so.
  std::optional<EpilogueArguments> plan_epilogue(const CombineCall& call, CombineArguments* combine) const;
  // Whether an engine, or the launch of two hops, carries the messages that the kernels of the phases store.
  bool over_engine() const { return exchange_.engine.has_value(); }
  std::byte* windows_of(int peer) const;
  void init_hop_memory() const;
  HopArguments hop_arguments(Operation operation, HopContent content) const;
  void hop_messages(HopArguments arguments, const LaneView& lane, const PlanView& plan, std::int64_t parts,
                    bool planned, const LaunchShape& shape, Stream stream) const;
  void hop_rows(bool continues, Stream stream);
  void hop_headers(Operation operation, cudaStream_t stream) const;
  void hop_values(const RouteValuesCall& call, Stream stream) const;
  void post_refusal(const RefusalArguments& arguments, cudaStream_t stream) const;
  // The first and the last step of a small call's phase.
  void begin(Operation operation, const CallPointers& pointers, Phase phase, Stream stream);
  void end(Phase phase) {
    if (phase != Phase::send) ++calls_;
  }
  void require_own_stream(Operation operation, Stream stream) {
    streams_.require_own(operation, stream, calls_ + 1);
  }
  void wait_for_calls() const;
  void init_memory() const;
  OwnArrays make_own_arrays() const;
  LaunchShape shape(int sm_limit) const;
  DispatchArguments dispatch_arguments(const DispatchCall& call, bool keeps_inputs) const;
  void set_receive_buffers(const DispatchCall& call, DispatchArguments& arguments);
  void keep_scales(DispatchArguments& arguments, Stream stream) const;
  std::byte* further_scale_rows(Stream stream);
  void set_tiles(const DispatchCall& call, DispatchArguments& arguments, Stream stream);

  const ExchangeState& exchange_;
  const int index_;
  const LaneArrays arrays_;
  DeviceMemory memory_;
  DeviceMemory hop_memory_;  // HopWorkingMemory
  PinnedMemory pinned_;
  PinnedMemory counts_;  // HostCounts
  LaneView view_;
  const OwnArrays own_;
  DiagnosticsReader diagnostics_;
  PointerCheck pointer_check_;
  LaneStreams streams_;

  // Kept from a send phase for the receive phase.
  DispatchArguments dispatch_{};
  DispatchMode dispatch_mode_{};
  std::optional<ScaleTileArguments> tiles_;
  DeviceMemory further_scale_rows_;
  CombineArguments combine_{};
  std::optional<EpilogueArguments> epilogue_;
  LaunchShape phase_shape_;
  DispatchResult result_;
  std::uint64_t calls_ = 0;                    // enqueued so far
  std::uint64_t counted_ = 0;                  // calls of dispatch_counts
  std::vector<std::int32_t> tokens_, routes_;  // of counts_of_headers(): [R], [L]
};

}  // namespace ferry::cuda
