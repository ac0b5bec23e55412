// A lane of an exchange of experts in slices. It routes a slice of the tokens through a lane of the backend
// inside, and gathers and adds in the sub-group. On a device all of it is on the caller's stream and the host
// waits for nothing, so a call can be captured.
//
// Every rank makes the same calls inside, whatever errors occur: on a device a rank that cannot go on makes
// the remaining calls with no tokens and no rows.
#pragma once

#include <cstdint>

#include "backends/sliced/steps.hpp"
#include "exchange/backend.hpp"
#include "ferry/group.hpp"

namespace ferry::sliced {

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

}  // namespace ferry::sliced
