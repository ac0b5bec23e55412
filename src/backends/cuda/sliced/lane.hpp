// A lane of an exchange of experts in slices on a GPU. It routes a slice of the tokens through a lane of the
// backend inside, and gathers and adds in the sub-group, all on the caller's stream. The host waits for
// nothing, so a call can be captured.
// nothing, so a call can be captured.
//
// Every rank makes the same calls inside, whatever errors occur: a rank that cannot go on makes the remaining
// calls with no tokens and no rows.
#pragma once

#include <cstdint>

#include "backends/cuda/sliced/arrays.hpp"
#include "backends/cuda/sliced/slices.hpp"
#include "exchange/backend.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

// Facts that all lanes share. Constant after construction.
struct SlicedContext {
  Rank rank;
  Config config;
  Backend* inner;
  int blocks;  // of a launch
  // True: calls of the backend inside report errors on the device, and the host goes on to the next call.
  // False (over an engine): they throw, on all ranks alike.
  bool late_errors;

  int me() const { return rank.index(); }
  int ranks() const { return rank.size(); }
  int tp() const { return config.placement.tp(); }
};

class SlicedLane {
 public:
  // `view`: of the lane inside. `memory`: zeroed, sliced_arrays().bytes. `totals`: memory of the host that
  // the device accesses.
  SlicedLane(const SlicedContext& context, int index, const LaneView& view, std::byte* memory,
             HostTotals* totals);

  // The arguments' pointers have been checked.
  DispatchResult dispatch(const DispatchCall& call, Stream stream);
  void combine(const CombineCall& call, Stream stream);
  // Refuses all calls inside that the operation would make.
  void refuse(Operation operation, const Error& error, Stream stream) const noexcept;

  OwnArrays own_arrays() const;

  // Address of SliceState::first.
  const std::int32_t* first_token() const { return &array<SliceState>(arrays_.state)->first; }
  const SliceTotals* all_calls() const { return array<SliceTotals>(arrays_.all_calls); }
  const std::int32_t* group_expert() const { return array<std::int32_t>(arrays_.group_expert); }

 private:
  template <class T>
  T* array(std::int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  SliceTerms* terms() const { return array<SliceTerms>(arrays_.terms); }  // of all ranks
  SegmentTables tables() const;
  SliceShape shape() const;
  int blocks_for(std::int64_t rows, int sm_limit) const;
  void gather_terms(Stream stream) const;
  FindSegmentsArguments segments_of(const Plan& plan) const;
  DispatchResult route(const DispatchCall& call, Stream stream) const;
  DispatchResult result_of(const DispatchResult& routed, const DispatchCall& call) const;
  void unpack(const DispatchResult& result, std::int64_t row_bytes, int sm_limit, Stream stream) const;

  const SlicedContext& context_;
  const int index_;
  const LaneView view_;
  const SlicedArrays arrays_;
  std::byte* const memory_;
  HostTotals* const totals_;
  std::uint64_t dispatches_ = 0;  // enqueued so far
};

}  // namespace ferry::cuda
