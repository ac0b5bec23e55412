// The backend of experts in slices (Placement::ep_tp), on host and on device memory: holds the backend
// inside, which routes a slice of the tokens, and gathers within the sub-groups.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backends/sliced/steps.hpp"
#include "base/errors.hpp"
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/device_work.hpp"
#include "exchange/sliced.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"

namespace ferry::sliced {

// A lane routes a slice of the tokens through a lane of the backend inside, and gathers and adds in the
// sub-group. On a device all of it is on the caller's stream and the host waits for nothing, so a call can be
// captured.
//
// Every rank makes the same calls inside, whatever errors occur: on a device a rank that cannot go on makes
// the remaining calls with no tokens and no rows.

// Facts that all lanes share. Constant after construction.
struct SlicedContext {
  Rank rank;
  Config config;
  Backend* inner;
  bool on_device;
  // True: calls of the backend inside report errors on the device, and the host goes on to the next call.
  // False (on the host, over an engine): they throw, on all ranks alike.
  bool late_errors;

  int me() const { return rank.index(); }
  int ranks() const { return rank.size(); }
  int tp() const { return config.placement.tp(); }
};

class Lane {
 public:
  // `memory`: zeroed, sliced_arrays().bytes. `totals`: memory of the host that the device accesses. All
  // outlive the lane.
  Lane(const SlicedContext& context, int index, SliceSteps& steps, std::byte* memory, HostTotals* totals);

  // The arguments' pointers have been checked.
  DispatchResult dispatch(const DispatchCall& call);
  void combine(const CombineCall& call);
  // Refuses all calls inside that the operation would make.
  void refuse(Operation operation, const Error& error, Stream stream) const noexcept;

  OwnArrays own_arrays() const;

  // Address of SliceState::first.
  const std::int32_t* first_token() const { return &array<SliceState>(arrays_.state)->first; }
  const SliceTotals* all_calls() const { return array<SliceTotals>(arrays_.all_calls); }
  std::int32_t* group_expert() const { return array<std::int32_t>(arrays_.group_expert); }

 private:
  template <class T>
  T* array(std::int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  SliceTerms* terms() const { return array<SliceTerms>(arrays_.terms); }  // of all ranks
  SliceState* state() const { return array<SliceState>(arrays_.state); }
  SegmentTables tables() const;
  // A number in the lane's state, at most `most`: its value where the host knows it, else its address.
  struct Counted {
    std::int64_t count;
    const std::int32_t* on_device;
  };
  Counted counted(const std::int32_t* number, std::int64_t most) const {
    if (context_.on_device) return {most, number};
    return {*number, nullptr};
  }
  void gather_terms(Stream stream) const;
  void gather_rows(const Counted& rows, const void* from, std::int64_t row_bytes, void* to,
                   std::int64_t capacity, Stream stream) const;
  FindSegments segments_of(const Plan& plan) const;
  DispatchResult route(const DispatchCall& call) const;
  DispatchResult result_of(const DispatchResult& routed, const DispatchCall& call) const;
  std::int64_t pack(const DispatchResult& routed, const DispatchResult& result,
                    const CallOptions& options) const;
  void unpack(const DispatchResult& result, std::int64_t row_bytes, const CallOptions& options) const;
  void add_outputs(const CombineCall& call, DType type) const;

  const SlicedContext& context_;
  const int index_;
  const Config routed_;  // of the lane inside
  const SliceShape shape_;
  const SlicedArrays arrays_;
  SliceSteps& steps_;
  std::byte* const memory_;
  HostTotals* const totals_;
  std::uint64_t dispatches_ = 0;  // enqueued so far
};

// A lane with its memory and its steps.
class OwnedLane {
 public:
  virtual ~OwnedLane() = default;

  virtual Lane& lane() = 0;
  const Lane& lane() const { return const_cast<OwnedLane*>(this)->lane(); }
  // Throw UsageError for memory of the caller that the steps cannot use.
  virtual void check_pointers(const DispatchCall&) const {}
  virtual void check_pointers(const CombineCall&) const {}
  virtual std::int32_t first_token() const = 0;  // of the last dispatch's slice
  // Adds what the gathers have sent.
  virtual void add_sent(WireCounts& sum) const = 0;
};

class SlicedBackend final : public Backend {
 public:
  SlicedBackend(const Rank& rank, const Config& config, std::unique_ptr<Backend> inner)
      : inner_(std::move(inner)),
        context_{.rank = rank,
                 .config = config,
                 .inner = inner_.get(),
                 .on_device = config.memory == MemoryKind::device,
                 .late_errors = inner_->capabilities().late_errors} {}

  const SlicedContext& context() const { return context_; }
  Backend& inner() const { return *inner_; }
  void add(std::unique_ptr<OwnedLane> lane) { lanes_.push_back(std::move(lane)); }

  Capabilities capabilities() const override {
    return context_.on_device ? inner_->capabilities() : Capabilities{};
  }
  Sizes sizes() const override {
    return sliced_backend_sizes(context_.config, context_.me(), inner_->sizes());
  }

  // Split calls are refused: slices gather from each other, so even a send phase would wait for peers.
  DispatchResult dispatch(const DispatchCall& call, bool split) override {
    if (split) refuse_unsupported(Operation::dispatch, call.options, "phases: call dispatch()");
    check_pointers(Operation::dispatch, call);
    return lane(call.options.lane).dispatch(call);
  }
  void combine(const CombineCall& call, bool split) override {
    if (split) refuse_unsupported(Operation::combine, call.options, "phases: call combine()");
    check_pointers(Operation::combine, call);
    lane(call.options.lane).combine(call);
  }
  DispatchResult dispatch_receive(const CallOptions&) override { return {}; }  // no send phase was accepted
  void combine_receive(const CallOptions&) override {}
  SmallResult run(const SmallCall& call) override {
    const Operation operation = operation_of(call);
    if (operation == Operation::route_values || operation == Operation::return_values)
      refuse_unsupported(operation, call_options_of(call), to_string(operation));
    if (operation == Operation::dispatch_counts) {
      refuse_unsupported(operation, call_options_of(call), "dispatch_counts: they have room for any routing");
    }
    return inner_->run(call);
  }

  OwnArrays own_arrays(int lane) const override {
    return lanes_[static_cast<std::size_t>(lane)]->lane().own_arrays();
  }
  std::unique_ptr<DeviceWork> make_device_work() const override { return inner_->make_device_work(); }
  void refuse(Operation operation, const Error& error, const CallOptions& call) noexcept override {
    const bool in_steps = operation == Operation::dispatch || operation == Operation::combine;
    if (in_steps && call.lane >= 0 && call.lane < context_.config.lanes) {
      lane(call.lane).refuse(operation, error, call.stream);
    } else {
      inner_->refuse(operation, error, call);
    }
  }
  void synchronize(const CallOptions& call) override { inner_->synchronize(call); }
  void raise_device_error(int lane) override { inner_->raise_device_error(lane); }
  CallDiagnostics take_diagnostics(int index) override {
    CallDiagnostics found = inner_->take_diagnostics(index);
    if (found.bad_id.count > 0)
      unsliced_id(context_.config, lanes_[static_cast<std::size_t>(index)]->first_token(), found.bad_id);
    return found;
  }
  LoadCounts load_counts() const override { return load_of_slices(inner_->load_counts(), context_.config); }
  WireCounts wire_counts() const override {
    WireCounts sum = inner_->wire_counts();
    for (const auto& lane : lanes_) lane->add_sent(sum);
    return sum;
  }
  void add_waits(WaitTimes& sum) const override { inner_->add_waits(sum); }

 private:
  Lane& lane(int index) { return lanes_[static_cast<std::size_t>(index)]->lane(); }

  // Checks the caller's pointers before the first step reads them.
  template <class Call>
  void check_pointers(Operation operation, const Call& call) {
    or_refuse([&](const Error& error) { refuse(operation, error, call.options); },
              [&] { lanes_[static_cast<std::size_t>(call.options.lane)]->check_pointers(call); });
  }
  [[noreturn]] void refuse_unsupported(Operation operation, const CallOptions& call, const char* what) {
    const UnsupportedError error(str("experts in slices (Placement::ep_tp) do not have ", what));
    refuse(operation, error, call);
    throw error;
  }

  const std::unique_ptr<Backend> inner_;
  const SlicedContext context_;
  std::vector<std::unique_ptr<OwnedLane>> lanes_;
};

}  // namespace ferry::sliced
