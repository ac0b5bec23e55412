// The steps of a call of experts in slices on a device, between the calls of the lane inside: its ranks agree
// on the arguments and take their slices, find where rows lie, and move them.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/operations/gather.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "backends/cuda/sliced/steps.hpp"
#include "backends/sliced/positions.hpp"
#include "base/integers.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

using namespace ferry::sliced;

inline constexpr int kStepThreads = 1024;  // of a step that a single block executes
inline constexpr int kMoveThreads = 512;

// --- agreement: ranks publish their arguments, compare them, and take their slices. A single block.
// ---------

// In shared memory.
struct AgreeState {
  std::uint64_t sums[kStepThreads / 32];  // of each warp
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

// [block] Publishes this rank's terms. The ids' hash is a sum, so the threads may add in any
// order.
__device__ inline void post_dispatch(const SliceStep<PostDispatch>& step, AgreeState* state) {
  const PostDispatch& call = step.call;
  if (threadIdx.x == 0) state->tokens = slice_token_count(step.lane, call);
  __syncthreads();
  const std::int64_t routes = state->tokens * call.shape.top_k;
  std::uint64_t sum = 0;
  for (std::int64_t route = threadIdx.x; route < routes; route += kStepThreads)
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

// [block]
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
  for (std::int64_t i = threadIdx.x; i < routes; i += kStepThreads) take_slot(call, state->slice, i);
}

// [block]
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
  for (std::int64_t i = threadIdx.x; i < routes; i += kStepThreads)
    call.slice_weights[i] = call.topk_weights[first + i];
}

// --- moves of rows: one row at a time by each warp ---------------------------------------------------------

// [grid] Calls use(index) for every index below `count`, with a whole warp.
template <class Use>
__device__ __forceinline__ void for_each_of_warps(std::int64_t count, Use use) {
  const std::int64_t warps = std::int64_t{gridDim.x} * (kMoveThreads / 32);
#pragma unroll 1
  for (std::int64_t index = blockIdx.x + std::int64_t{gridDim.x} * (threadIdx.x / 32); index < count;
       index += warps)
    use(index);
}

// [warp] Executes the work on a row.
struct ThisWarp {
  __device__ __forceinline__ bool first() const { return index() == 0; }
  __device__ __forceinline__ int index() const { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int threads() const { return 32; }
  __device__ __forceinline__ void copy(std::byte* to, const std::byte* from, std::int64_t bytes) const {
    copy_bytes(to, from, bytes);
  }
  // Rows are whole words.
  __device__ __forceinline__ void zero(std::byte* bytes, std::int64_t begin, std::int64_t end) const {
    auto* const words = reinterpret_cast<std::uint32_t*>(bytes);
    for (std::int64_t i = begin / 4 + index(); i < end / 4; i += 32) words[i] = 0;
  }
  __device__ __forceinline__ void store(std::byte* to, const SliceRowTail& tail) const {
    *reinterpret_cast<SliceRowTail*>(to) = tail;
  }
  __device__ __forceinline__ SliceRowTail load(const std::byte* from) const {
    return *reinterpret_cast<const SliceRowTail*>(from);
  }
  // Converts values of two bytes to fp32.
  __device__ __forceinline__ void widen(DType type, const std::byte* from, std::byte* to, int values) const {
    for (int column = 4 * index(); column < values; column += 128) {
      float value[4];
      load_four(type, from, column, value);
      *reinterpret_cast<uint4*>(to + 4 * static_cast<std::int64_t>(column)) =
          make_uint4(bits_of(value[0]), bits_of(value[1]), bits_of(value[2]), bits_of(value[3]));
    }
  }
};

__device__ inline void copy_tokens(const CopyTokens& call) {
  for_each_of_warps(call.state->count, [&](std::int64_t token) { copy_token(ThisWarp{}, call, token); });
}

__device__ inline void pack_rows(const PackRows& call) {
  for_each_of_warps(call.state->own_rows, [&](std::int64_t row) { pack_row(ThisWarp{}, call, row); });
}

__device__ inline void unpack_rows(const UnpackRows& call) {
  const std::int64_t rows = call.state->gathered;
  for_each_of_warps(rows + call.shape.local_experts, [&](std::int64_t index) {
    if (index < rows) {
      unpack_row(ThisWarp{}, call, index);
    } else {
      pad_group(ThisWarp{}, call, static_cast<int>(index - rows));
    }
  });
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const auto sent =
      static_cast<unsigned long long>(call.state->own_rows) * static_cast<unsigned>(call.shape.tp - 1);
  add_wire(&call.all_calls->dispatch_messages, sent);
  add_wire(&call.all_calls->dispatch_bytes, sent * static_cast<unsigned long long>(call.row_bytes));
}

__device__ inline void pack_outputs(const PackOutputs& call) {
  for_each_of_warps(call.state->gathered, [&](std::int64_t row) { pack_output(ThisWarp{}, call, row); });
}

__device__ inline void copy_results(const CopyResults& call) {
  for_each_of_warps(std::int64_t{call.state->tokens} * call.slots, [&](std::int64_t row) {
    copy_bytes(call.to + row * call.stride, call.from + row * call.row_bytes, call.row_bytes);
  });
}

// --- segments: where the rows of each slice's senders lie, from the counts of a plan. A single block.
// -------

// In shared memory.
struct SegmentState {
  std::int64_t gathered, own_rows;  // sums
  std::int64_t rows;                // padding included
};

// [block] run() is called by a whole block.
class SegmentFinder {
 public:
  __device__ SegmentFinder(const SliceStep<FindSegments>& step, SegmentState* state)
      : lane_(step.lane),
        call_(step.call),
        state_(*state),
        shape_(step.call.shape),
        ep_(step.call.shape.sub_groups()) {}

  __device__ void run() {
    // Excludes an aborted dispatch, and a plan that combine refuses.
    bool damaged = check_plan(lane_, *call_.plan.header, -1) != PlanFault::none;
    damaged = __syncthreads_or(damaged) != 0;
    if (!damaged) damaged = __syncthreads_or(add_pairs()) != 0;
    if (!damaged) damaged = __syncthreads_or(place_pairs()) != 0;
    if (damaged) {
      clear();
    } else {
      place_segments();
    }
    __syncthreads();
    publish(damaged);
  }

 private:
  __device__ int pairs() const { return shape_.pairs(); }

  // Adds up the counts of pairs. Returns true if a count is impossible.
  __device__ bool add_pairs() {
    bool damaged = false;
    for (int pair = static_cast<int>(threadIdx.x); pair < pairs(); pair += kStepThreads) {
      std::int64_t rows = 0;
      for (int source = 0; source < ep_; ++source) {
        const std::int32_t more =
            call_.count(pair / shape_.local_experts, pair % shape_.local_experts, source);
        damaged = damaged || more < 0;
        rows += more;
      }
      damaged = damaged || rows > shape_.capacity;
      call_.tables.pair_rows[pair] = static_cast<std::int32_t>(rows);
    }
    return damaged;
  }

  // [warp] Calls place(index, sum before it) for `count` numbers; returns the sum of all.
  template <class Number, class Place>
  __device__ std::int64_t sum_up(int count, Number number, Place place) const {
    const int thread = static_cast<int>(threadIdx.x % 32);
    std::int64_t before = 0;
    for (int first = 0; first < count; first += 32) {
      const int index = first + thread;
      const std::int64_t mine = index < count ? number(index) : 0;
      std::int64_t sum = mine;
      for (int step = 1; step < 32; step *= 2) {
        const std::int64_t lower =
            __shfl_sync(~0u, static_cast<long long>(sum), thread >= step ? thread - step : thread);
        if (thread >= step) sum += lower;
      }
      if (index < count) place(index, before + sum - mine);
      before += __shfl_sync(~0u, static_cast<long long>(sum), 31);
    }
    return before;
  }

  // Prefix sums: the first warp over pairs among the gathered rows, the second over experts among the rows.
  // Returns true if there are more rows than this rank can have, or if their number differs from the plan's
  // total.
  __device__ bool place_pairs() {
    const std::int32_t* const rows = call_.tables.pair_rows;
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp == 0) {
      const int own = shape_.tp_rank() * shape_.local_experts;
      const std::int64_t gathered = sum_up(
          pairs(), [&](int pair) { return std::int64_t{rows[pair]}; },
          [&](int pair, std::int64_t before) {
            call_.tables.pair_first[pair] = static_cast<std::int32_t>(before);
          });
      const std::int64_t mine = sum_up(
          shape_.local_experts, [&](int local) { return std::int64_t{rows[own + local]}; },
          [](int, std::int64_t) {});
      if (threadIdx.x == 0) {
        state_.gathered = gathered;
        state_.own_rows = mine;
      }
    } else if (warp == 1) {
      const std::int64_t all = sum_up(
          shape_.local_experts, [&](int local) { return call_.aligned(call_.rows_of_expert(local)); },
          [&](int local, std::int64_t before) {
            call_.tables.group_first[local] = static_cast<std::int32_t>(before);
          });
      if (threadIdx.x % 32 == 0) state_.rows = all;
    }
    __syncthreads();
    return state_.rows > shape_.capacity || state_.gathered > shape_.capacity ||
           state_.own_rows != call_.plan.header->total;
  }

  __device__ void place_segments() {
    for (int pair = static_cast<int>(threadIdx.x); pair < pairs(); pair += kStepThreads)
      call_.place_pair(pair);
    if (threadIdx.x == 0)
      call_.tables.gathered_row[pairs() * ep_] = static_cast<std::int32_t>(state_.gathered);
    for (int local = static_cast<int>(threadIdx.x); local < shape_.local_experts; local += kStepThreads)
      call_.place_expert(local);
  }

  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i <= pairs() * ep_; i += kStepThreads)
      call_.tables.gathered_row[i] = 0;
    for (int i = static_cast<int>(threadIdx.x); i < pairs(); i += kStepThreads) call_.tables.pair_rows[i] = 0;
    for (int i = static_cast<int>(threadIdx.x); i < shape_.local_experts; i += kStepThreads)
      call_.tables.group_first[i] = 0;
    if (threadIdx.x == 0) state_ = {};
  }

  __device__ void publish(bool damaged) {
    for (int local = static_cast<int>(threadIdx.x); local < shape_.local_experts && call_.counts != nullptr;
         local += kStepThreads) {
      call_.counts[local] = static_cast<std::int32_t>(call_.rows_of_expert(local));
      call_.row_offsets[local] = call_.tables.group_first[local];
    }
    if (threadIdx.x != 0) return;
    call_.state->own_rows = static_cast<std::int32_t>(state_.own_rows);
    call_.state->gathered = static_cast<std::int32_t>(state_.gathered);
    if (call_.terms != nullptr) {
      *call_.terms = SliceTerms{damaged ? 0 : call_.plan.header->tokens, 0, state_.gathered, call_.types,
                                call_.arguments | (damaged ? kPlanDamaged : 0)};
      return;
    }
    call_.row_offsets[shape_.local_experts] = static_cast<std::int32_t>(state_.rows);
    // One store: the host reads the call number first.
    store_packet_relaxed_sys(reinterpret_cast<LLPacket*>(call_.totals),
                             {++call_.all_calls->dispatches, static_cast<std::uint64_t>(state_.rows)});
  }

  const LaneView& lane_;
  const FindSegments& call_;
  SegmentState& state_;
  const SliceShape& shape_;
  const int ep_;  // sub-groups
};

__device__ inline void find_segments(const SliceStep<FindSegments>& step, SegmentState* state) {
  SegmentFinder(step, state).run();
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
