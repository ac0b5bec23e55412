// How the ranks of a call agree before and between the calls of the lane inside: they publish their
// arguments, compare them, and take their slices.
#pragma once

#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "backends/cuda/sliced/steps.hpp"
#include "backends/sliced/positions.hpp"
#include "base/integers.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

using namespace ferry::sliced;

inline constexpr int kAgreeThreads = 1024;

// In shared memory.
struct AgreeState {
  std::uint64_t sums[kAgreeThreads / 32];  // of each warp
  std::int64_t tokens;
  SliceState slice;
};

// [thread] N, which may be known on the device only. An N out of range counts as 0 and is reported.
__device__ inline std::int64_t slice_token_count(const LaneView& lane, const PostDispatch& call) {
  if (call.device_tokens == nullptr) return call.tokens;
  const std::int32_t tokens = *call.device_tokens;
  if (tokens >= 0 && tokens <= call.tokens) return tokens;
  abort_call(lane, lane.state->calls[0] + 1, Operation::dispatch, DeviceError::Reason::too_many, lane.rank, 0,
             tokens, call.tokens);
  return 0;
}

// [block] Publishes this rank's terms. A single block. The ids' hash is a sum, so the threads may add in any
// order.
__device__ inline void post_dispatch(const SliceStep<PostDispatch>& step, AgreeState* state) {
  const PostDispatch& call = step.call;
  if (threadIdx.x == 0) state->tokens = slice_token_count(step.lane, call);
  __syncthreads();
  const std::int64_t routes = state->tokens * call.shape.top_k;
  std::uint64_t sum = 0;
  for (std::int64_t route = threadIdx.x; route < routes; route += kAgreeThreads)
    sum += mixed_bits(static_cast<std::uint64_t>(route),
                      static_cast<std::uint64_t>(caller_id(call.ids, call.wide_ids, route)));
  for (unsigned step_width = 16; step_width > 0; step_width /= 2)
    sum += static_cast<std::uint64_t>(__shfl_sync(~0u, static_cast<long long>(sum),
                                                  static_cast<int>((threadIdx.x % 32 + step_width) % 32)));
  if (threadIdx.x % 32 == 0) state->sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  std::uint64_t all = 0;
  for (const std::uint64_t each : state->sums) all += each;
  *call.terms = SliceTerms{state->tokens, all, 0, 0, 0};
}

// [thread] Whether the ranks' terms agree. Else records why the call fails; the next call of the lane inside
// belongs to it.
__device__ inline bool terms_agree(const LaneView& lane, Operation operation, const SliceDifference& found) {
  if (!found.found) return true;
  abort_call(lane, lane.state->calls[0] + 1, operation, DeviceError::Reason::slices, found.rank,
             static_cast<int>(found.fault) | found.other << kSliceFaultBits, found.mine, found.theirs);
  return false;
}

// [thread] Whether the call before, which gathers the terms, was aborted.
__device__ __forceinline__ bool gather_was_aborted(const LaneView& lane, bool may_be_aborted) {
  return may_be_aborted && is_aborted(lane, lane.state->calls[0]);
}

// [block] A single block.
__device__ inline void take_slice(const SliceStep<TakeSlice>& step, AgreeState* state) {
  const TakeSlice& call = step.call;
  if (threadIdx.x == 0) {
    SliceState slice{};
    const std::int64_t tokens = call.terms[call.shape.rank].tokens;
    if (!gather_was_aborted(step.lane, step.may_be_aborted) &&
        terms_agree(step.lane, Operation::dispatch, dispatch_difference(call.shape, call.terms)) &&
        tokens >= 0 && tokens <= call.shape.max_tokens)
      slice = slice_of(call.shape, tokens);
    state->slice = slice;
    *call.state = slice;
  }
  __syncthreads();
  const std::int64_t routes = std::int64_t{state->slice.count} * call.shape.top_k;
  for (std::int64_t i = threadIdx.x; i < routes; i += kAgreeThreads) take_slot(call, state->slice, i);
}

// [block] A single block.
__device__ inline void take_combine(const SliceStep<TakeCombine>& step, AgreeState* state) {
  const TakeCombine& call = step.call;
  const SliceShape& shape = call.shape;
  if (threadIdx.x == 0) {
    SliceState slice{};
    if (!gather_was_aborted(step.lane, step.may_be_aborted) &&
        terms_agree(step.lane, Operation::combine, combine_difference(shape, call.terms))) {
      slice = combine_slice(call);
      const auto rows = static_cast<unsigned long long>(slice.gathered - slice.own_rows),
                 results = static_cast<unsigned long long>(slice.slots) * static_cast<unsigned>(shape.tp - 1);
      add_wire(&call.all_calls->combine_messages, rows + results);
      add_wire(&call.all_calls->combine_bytes,
               rows * static_cast<unsigned long long>(call.output_bytes) +
                   results * static_cast<unsigned long long>(call.result_bytes));
    }
    state->slice = slice;
    *call.state = slice;
  }
  __syncthreads();
  if (call.topk_weights == nullptr) return;
  const std::int64_t first = std::int64_t{state->slice.first} * shape.top_k,
                     routes = std::int64_t{state->slice.count} * shape.top_k;
  for (std::int64_t i = threadIdx.x; i < routes; i += kAgreeThreads)
    call.slice_weights[i] = call.topk_weights[first + i];
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
