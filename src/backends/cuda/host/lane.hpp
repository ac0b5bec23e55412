// A lane of the CUDA backend on one rank: its memory, and its calls.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/host/call_pointers.hpp"
#include "backends/cuda/host/carrier.hpp"
#include "backends/cuda/host/diagnostics_reader.hpp"
#include "backends/cuda/host/exchange_state.hpp"
#include "backends/cuda/host/lane_streams.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/operations/small_operations.hpp"
#include "base/errors.hpp"
#include "exchange/backend.hpp"
#include "exchange/compared_options.hpp"

namespace ferry::cuda {

// The options of a call as kernels compare them. The plan's call follows in the kernel, which reads it from
// the plan's header.
AgreedOptions agreed_options_of(Operation operation, const ComparedOptions& options);

class Lane {
 public:
  Lane(const ExchangeState& exchange, int index);

  // A carrier moves the messages of this lane's calls from now on. Null: the lane makes no more calls.
  void carry_by(std::unique_ptr<Carrier> carrier) { carrier_ = std::move(carrier); }

  // As those of Backend. Without a carrier each is one launch that waits for peers, and short ones around it.
  // If a send phase throws for a reason that only this rank knows, it has refused the call.
  DispatchResult dispatch(const DispatchCall& call, bool split);
  DispatchResult dispatch_receive(Stream stream);
  void combine(const CombineCall& call, bool split);
  void combine_receive(Stream stream);
  // After a call of dispatch_counts without a carrier: await_dispatch_counts() waits a while, and returns
  // whether the kernel has ended; counted_dispatch() returns whether the kernel has counted, or was aborted.
  SmallResult run(const SmallCall& call);
  bool await_dispatch_counts(Stream stream) const;
  bool counted_dispatch() const;
  DispatchCounts dispatch_counts();  // of the last call
  // Refuses the call that has begun, or else the next one. If another rank uses `stream`: runs on a stream of
  // its own, and blocks until all ranks have called.
  void refuse(Operation operation, const ErrorRecord& error, Stream stream) noexcept;
  // Runs a step of a call. If it throws, refuses the call, so that the peers get the error too instead of
  // waiting. A refusal by kernels follows only on a UsageError: all others are of the device.
  template <class Step>
  std::invoke_result_t<Step> refusing(Operation operation, Stream stream, Step step) {
    return or_refuse<std::exception>(
        [&](const std::exception& error) {
          if (exchange_.over_engine() || dynamic_cast<const UsageError*>(&error) != nullptr)
            refuse(operation, ErrorRecord::of(std::current_exception()), stream);
        },
        step);
  }

  // Throws UsageError if kernels cannot use the pointers.
  void require_usable(const char* operation, const CallPointers& pointers) {
    pointer_check_.require_usable(operation, pointers);
  }

  // Throws the error of an aborted call of this lane, once.
  void raise_device_error();
  CallDiagnostics take_diagnostics();
  // Add this lane's counts to the argument; of loads those by layer.
  void add_load(LoadCounts& sum) const;
  void add_wire(WireCounts& counts) const;

  // The memory of the step metadata, on the device.
  void* joined() const { return array<std::byte>(arrays_.joined); }
  const LaneView& view() const { return view_; }
  int index() const { return index_; }
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
  // Whether a carrier moves the messages that the kernels of the phases store.
  bool is_carried() const { return exchange_.engine.has_value(); }
  // A call over a carrier up to its send phase, which enqueues kernels and returns what they store.
  template <class SendPhase>
  void send(Operation operation, const ComparedOptions& options, CallPart part, bool split, Stream stream,
            SendPhase send_phase) {
    const Stored stored = refusing(operation, stream, [&] {
      carrier_->begin(operation, options, part, stream);
      return send_phase();
    });
    carrier_->post(stored, split, stream);
  }
  // Each enqueues the kernels of one phase, or of a fused call. Over a carrier a call counts when its receive
  // phase is enqueued. `keeps_inputs`, of a send phase: its tokens or outputs stay unchanged until the
  // receive phase has run, which then reads this rank's own ones there, as a fused call does.
  void enqueue(const DispatchCall& call, Phase phase, bool keeps_inputs);
  void enqueue(const CombineCall& call, Phase phase, bool keeps_inputs);
  template <JoinsNumbers Call>
  SmallResult enqueue(const Call& call, Phase phase);
  SmallResult enqueue(const RouteValuesCall& call, Phase phase);
  SmallResult enqueue(const DispatchCountsCall& call, Phase phase);
  SmallResult enqueue(const GatherCall& call, Phase phase);
  // Small calls by phases.
  template <class Call>
  void exchange_headers(const Call& call);
  template <JoinsNumbers Call>
  SmallResult carry(const Call& call);
  SmallResult carry(const RouteValuesCall& call);
  SmallResult carry(const DispatchCountsCall& call);
  SmallResult carry(const GatherCall& call);
  // The first part of a combine: its topk_weights travel to the rows. Returns one for each row here.
  const float* send_weights(const CombineCall& call);
  // Whether the combine under way adds the rows of a node; does so before its receive phase.
  bool adds_by_node() const;
  void add_on_nodes(Stream stream);
  DispatchCounts counts_of_headers();
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
  void set_tiles(const DispatchCall& call, DispatchArguments& arguments);

  const ExchangeState& exchange_;
  const int index_;
  const LaneArrays arrays_;
  DeviceMemory memory_;
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
  std::vector<std::int32_t> tokens_, routes_;  // of counts_of_headers(): [R], [slots]
  std::unique_ptr<Carrier> carrier_;           // null: kernels store messages where they are read
};

}  // namespace ferry::cuda
