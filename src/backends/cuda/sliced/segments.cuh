// Finds where the rows of each slice's senders lie, from the counts of a plan. A single block.
#pragma once

#include "backends/cuda/protocol/plan_header.cuh"
#include "backends/cuda/sliced/steps.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

using namespace ferry::sliced;

inline constexpr int kSegmentThreads = 1024;

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
    for (int pair = static_cast<int>(threadIdx.x); pair < pairs(); pair += kSegmentThreads) {
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
    for (int pair = static_cast<int>(threadIdx.x); pair < pairs(); pair += kSegmentThreads)
      call_.place_pair(pair);
    if (threadIdx.x == 0)
      call_.tables.gathered_row[pairs() * ep_] = static_cast<std::int32_t>(state_.gathered);
    for (int local = static_cast<int>(threadIdx.x); local < shape_.local_experts; local += kSegmentThreads)
      call_.place_expert(local);
  }

  __device__ void clear() {
    for (int i = static_cast<int>(threadIdx.x); i <= pairs() * ep_; i += kSegmentThreads)
      call_.tables.gathered_row[i] = 0;
    for (int i = static_cast<int>(threadIdx.x); i < pairs(); i += kSegmentThreads)
      call_.tables.pair_rows[i] = 0;
    for (int i = static_cast<int>(threadIdx.x); i < shape_.local_experts; i += kSegmentThreads)
      call_.tables.group_first[i] = 0;
    if (threadIdx.x == 0) state_ = {};
  }

  __device__ void publish(bool damaged) {
    for (int local = static_cast<int>(threadIdx.x); local < shape_.local_experts && call_.counts != nullptr;
         local += kSegmentThreads) {
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

}  // namespace ferry::cuda::inline FERRY_WIDTH
