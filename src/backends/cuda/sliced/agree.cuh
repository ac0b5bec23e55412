// How the ranks of a call agree before and between the calls of the lane inside: they publish their
// arguments, compare them, and take their slices.
#pragma once

#include "backends/cuda/device/mixed_bits.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "backends/cuda/sliced/slices.hpp"
#include "plan/slot.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kAgreeThreads = 1024;

// In shared memory.
struct AgreeState {
  std::uint64_t sums[kAgreeThreads / 32];  // of each warp
  std::int64_t tokens;
  SliceState slice;
};

__device__ __forceinline__ std::int64_t caller_id(const void* ids, bool wide, std::int64_t index) {
  return wide ? static_cast<const std::int64_t*>(ids)[index] : static_cast<const std::int32_t*>(ids)[index];
}

// [thread] N, which may be known on the device only. An N out of range counts as 0 and is reported.
__device__ inline std::int64_t slice_token_count(const PostDispatchArguments& call) {
  if (call.device_tokens == nullptr) return call.tokens;
  const std::int32_t tokens = *call.device_tokens;
  if (tokens >= 0 && tokens <= call.tokens) return tokens;
  abort_call(call.lane, call.lane.state->calls[0] + 1, Operation::dispatch, DeviceError::Reason::too_many,
             call.lane.rank, 0, tokens, call.tokens);
  return 0;
}

// [block] Publishes this rank's terms. A single block. The ids' hash is a sum, so the threads may add in any
// order.
__device__ inline void post_dispatch(const PostDispatchArguments& call, AgreeState* state) {
  if (threadIdx.x == 0) state->tokens = slice_token_count(call);
  __syncthreads();
  const std::int64_t routes = state->tokens * call.lane.top_k;
  std::uint64_t sum = 0;
  for (std::int64_t route = threadIdx.x; route < routes; route += kAgreeThreads)
    sum += mixed_bits(static_cast<std::uint64_t>(route),
                      static_cast<std::uint64_t>(caller_id(call.ids, call.wide_ids, route)));
  for (unsigned step = 16; step > 0; step /= 2)
    sum += static_cast<std::uint64_t>(
        __shfl_sync(~0u, static_cast<long long>(sum), static_cast<int>((threadIdx.x % 32 + step) % 32)));
  if (threadIdx.x % 32 == 0) state->sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  std::uint64_t all = 0;
  for (const std::uint64_t each : state->sums) all += each;
  *call.terms = SliceTerms{state->tokens, all, 0, 0, 0};
}

// [thread] Records why the call fails. The next call of the lane inside belongs to it.
__device__ inline void report_slices(const LaneView& lane, Operation operation, SliceFault fault, int rank,
                                     int other, std::int64_t mine, std::int64_t theirs) {
  abort_call(lane, lane.state->calls[0] + 1, operation, DeviceError::Reason::slices, rank,
             static_cast<int>(fault) | other << kSliceFaultBits, mine, theirs);
}

// [thread] Whether the ranks of each sub-group pass the same tokens and ids. Reports the first rank that
// differs.
__device__ inline bool dispatch_terms_agree(const LaneView& lane, const SliceShape& shape,
                                            const SliceTerms* terms) {
  for (int rank = 0; rank < lane.ranks; ++rank) {
    const int first = rank - rank % shape.tp;
    if (terms[rank].tokens != terms[first].tokens) {
      report_slices(lane, Operation::dispatch, SliceFault::tokens, rank, first, terms[rank].tokens,
                    terms[first].tokens);
      return false;
    }
    if (terms[rank].ids_hash != terms[first].ids_hash) {
      report_slices(lane, Operation::dispatch, SliceFault::ids, rank, first, 0, 0);
      return false;
    }
  }
  return true;
}

__device__ inline SliceState slice_of(std::int64_t tokens, int tp_rank, int tp) {
  const auto [first, count] = TokenSlice::of(tokens, tp_rank, tp);
  SliceState slice{};
  slice.first = static_cast<std::int32_t>(first);
  slice.count = static_cast<std::int32_t>(count);
  slice.tokens = static_cast<std::int32_t>(tokens);
  return slice;
}

// [thread] Whether the call before, which gathers the terms, was aborted.
__device__ __forceinline__ bool gather_was_aborted(const LaneView& lane, bool may_be_aborted) {
  return may_be_aborted && is_aborted(lane, lane.state->calls[0]);
}

// [block] A single block.
__device__ inline void take_slice(const TakeSliceArguments& call, AgreeState* state) {
  const LaneView& lane = call.lane;
  const int tp_rank = lane.rank % call.shape.tp;
  if (threadIdx.x == 0) {
    SliceState slice{};
    const std::int64_t tokens = call.terms[lane.rank].tokens;
    if (!gather_was_aborted(lane, call.may_be_aborted) &&
        dispatch_terms_agree(lane, call.shape, call.terms) && tokens >= 0 && tokens <= call.shape.max_tokens)
      slice = slice_of(tokens, tp_rank, call.shape.tp);
    state->slice = slice;
    *call.state = slice;
  }
  __syncthreads();
  const std::int64_t first = std::int64_t{state->slice.first} * lane.top_k,
                     routes = std::int64_t{state->slice.count} * lane.top_k;
  const ExpertSlices slices{call.shape.experts, call.shape.tp};
  for (std::int64_t i = threadIdx.x; i < routes; i += kAgreeThreads) {
    call.slice_ids[i] = slices.id_of_slice(caller_id(call.ids, call.wide_ids, first + i), tp_rank);
    if (call.weights != nullptr) call.slice_weights[i] = call.weights[first + i];
  }
}

// [thread] Whether the ranks' plans and arguments are compatible. Reports the first rank that differs.
__device__ inline bool combine_terms_agree(const LaneView& lane, const SliceShape& shape,
                                           const SliceTerms* terms) {
  for (int rank = 0; rank < lane.ranks; ++rank) {
    const SliceTerms& mine = terms[rank];
    const int first = rank - rank % shape.tp;
    std::int64_t tokens = 0;
    for (int i = 0; i < shape.tp; ++i) tokens += terms[first + i].tokens;
    const std::int32_t expected = slice_of(tokens, rank % shape.tp, shape.tp).count;
    const auto report = [&](SliceFault fault, std::int64_t ours, std::int64_t theirs) {
      report_slices(lane, Operation::combine, fault, rank, expected, ours, theirs);
      return false;
    };
    if ((mine.arguments & kPlanDamaged) != 0) return report(SliceFault::plan, 0, 0);
    if (mine.rows > 0 && (mine.arguments & kHasOutputs) == 0)
      return report(SliceFault::outputs, mine.rows, 0);
    if (tokens > 0 && (mine.arguments & kHasResult) == 0) return report(SliceFault::result, tokens, 0);
    if (mine.types != terms[0].types) return report(SliceFault::types, mine.types, terms[0].types);
    if (expected != mine.tokens || tokens > shape.max_tokens)
      return report(SliceFault::slice, mine.tokens, tokens);
  }
  return true;
}

// [block] A single block.
__device__ inline void take_combine(const TakeCombineArguments& call, AgreeState* state) {
  const LaneView& lane = call.lane;
  const int tp = call.shape.tp, tp_rank = lane.rank % tp;
  if (threadIdx.x == 0) {
    SliceState slice{};
    if (!gather_was_aborted(lane, call.may_be_aborted) && combine_terms_agree(lane, call.shape, call.terms)) {
      std::int64_t tokens = 0;
      for (int i = 0; i < tp; ++i) tokens += call.terms[lane.rank - tp_rank + i].tokens;
      slice = slice_of(tokens, tp_rank, tp);
      slice.own_rows = call.state->own_rows;
      slice.gathered = call.state->gathered;
      slice.slots = slice.count * call.slots;
      const auto rows = static_cast<unsigned long long>(slice.gathered - slice.own_rows),
                 results = static_cast<unsigned long long>(slice.slots) * static_cast<unsigned>(tp - 1);
      add_wire(&call.all_calls->wire.combine_messages, rows + results);
      add_wire(&call.all_calls->wire.combine_bytes,
               rows * static_cast<unsigned long long>(call.output_bytes) +
                   results * static_cast<unsigned long long>(call.result_bytes));
    }
    state->slice = slice;
    *call.state = slice;
  }
  __syncthreads();
  if (call.topk_weights == nullptr) return;
  const std::int64_t first = std::int64_t{state->slice.first} * lane.top_k,
                     routes = std::int64_t{state->slice.count} * lane.top_k;
  for (std::int64_t i = threadIdx.x; i < routes; i += kAgreeThreads)
    call.slice_weights[i] = call.topk_weights[first + i];
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
