// Checks the counts and row_offsets of a combine by source, and finds where rows begin.
#pragma once

#include "backends/cuda/by_source/describe_rows.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kReturnThreads = 1024;

// Faults are ordered as the host checks them, and the lowest key is reported. `index`: of the row, the route
// or the entry.
__device__ __forceinline__ unsigned long long fault_key(SourceFault fault, std::int64_t index) {
  // Faults of rows are ordered by their rows.
  const auto kind = static_cast<std::uint64_t>(fault);
  const bool of_row = fault == SourceFault::shared_row || fault == SourceFault::other_expert;
  const std::uint64_t stage = of_row ? static_cast<std::uint64_t>(SourceFault::info) : kind;
  return stage << 56 | static_cast<std::uint64_t>(index) << 8 | kind;
}
__device__ __forceinline__ void record_fault(ReturnState* state, SourceFault fault, std::int64_t index) {
  atomicMax(&state->fault, ~fault_key(fault, index));
}

__device__ __forceinline__ std::int64_t returned_tokens(const PlanReturnArguments& arguments) {
  const PlanReturnCall& call = arguments.call;
  const std::int64_t tokens = call.device_tokens != nullptr ? *call.device_tokens : call.tokens;
  return tokens >= 0 && tokens <= arguments.lane.max_tokens ? tokens : 0;
}

// [block] Checks counts and row_offsets, and finds where the rows of each group and source begin. A single
// block.
class CountChecker {
 public:
  __device__ explicit CountChecker(const PlanReturnArguments& arguments)
      : arguments_(arguments),
        rows_(arguments.rows(returned_tokens(arguments))),
        lane_(arguments.lane),
        call_(arguments.call),
        state_(arguments.state()) {}

  __device__ void run() {
    const std::int64_t given = call_.device_tokens != nullptr ? *call_.device_tokens : call_.tokens;
    if (threadIdx.x == 0 && rows_.tokens != given) record_fault(state_, SourceFault::tokens, 0);
    bool wrong = rows_.tokens != given;
    for (int i = static_cast<int>(threadIdx.x); i < lane_.groups * lane_.ranks; i += kReturnThreads)
      wrong = wrong_count(i) || wrong;
    if (__syncthreads_or(wrong) != 0) return end(0);
    if (threadIdx.x < 32) place_groups();
    __syncthreads();
    const std::int64_t rows = arguments_.group_first()[lane_.groups];
    if (rows > lane_.capacity_rows) {
      if (threadIdx.x == 0) record_fault(state_, SourceFault::capacity, 0);
      return end(0);
    }
    wrong = threadIdx.x < 32 && offsets_differ();
    if (__syncthreads_or(wrong) != 0) return end(0);
    place_segments();
    end(rows);
  }

 private:
  // Records and returns whether the count of group i / R from source i % R is out of range.
  __device__ bool wrong_count(int i) const {
    const SourceFault fault = rows_.fault_of_count(i);
    if (fault != SourceFault::none) record_fault(state_, fault, i);
    return fault != SourceFault::none;
  }

  // [warp] Prefix sum: first row of each group. A sum beyond the capacity is kept at capacity + 1.
  __device__ void place_groups() const {
    const int thread = static_cast<int>(threadIdx.x);
    std::int64_t before = 0;
    for (int first = 0; first < lane_.groups; first += 32) {
      const int group = first + thread;
      const std::int64_t limit = lane_.capacity_rows + 1;
      std::int64_t mine = 0;
      if (group < lane_.groups) mine = ::min(limit, align(::min(limit, rows_.rows_of_group(group))));
      std::int64_t sum = mine;
      for (int step = 1; step < 32; step *= 2) {
        const std::int64_t lower =
            __shfl_sync(~0u, static_cast<long long>(sum), thread >= step ? thread - step : thread);
        if (thread >= step) sum += lower;
      }
      if (group < lane_.groups)
        arguments_.group_first()[group] = static_cast<std::int32_t>(::min(limit, before + sum - mine));
      const std::int64_t all = __shfl_sync(~0u, static_cast<long long>(sum), 31);
      before = ::min(limit, before + all);
    }
    if (thread == 0) arguments_.group_first()[lane_.groups] = static_cast<std::int32_t>(before);
  }
  __device__ std::int64_t align(std::int64_t rows) const {
    return lane_.by_alignment.round_up(static_cast<std::int32_t>(rows));
  }

  // [warp] Whether this thread has found an entry of row_offsets that contradicts the counts.
  __device__ bool offsets_differ() const {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int32_t* const first_row = arguments_.group_first();
    int number = 0;
    bool wrong = false;
    const auto compare = [&](int index, std::int32_t expected) {
      if (call_.row_offsets[index] == static_cast<std::uint32_t>(expected)) return;
      record_fault(state_, SourceFault::row_offsets, index);
      wrong = true;
    };
    for (int first = 0; first < lane_.groups; first += 32) {
      const int group = first + thread;
      const bool filled = group < lane_.groups && rows_.rows_of_group(group) > 0;
      const std::uint32_t all = __ballot_sync(~0u, filled);
      if (filled) compare(number + __popc(static_cast<int>(all & ((1u << thread) - 1))), first_row[group]);
      number += __popc(static_cast<int>(all));
    }
    if (thread == 0) compare(number, first_row[lane_.groups]);
    return wrong;
  }

  __device__ void place_segments() const {
    for (int group = static_cast<int>(threadIdx.x); group < lane_.groups; group += kReturnThreads) {
      std::int32_t row = arguments_.group_first()[group];
      for (int source = 0; source < lane_.ranks; ++source) {
        arguments_.segment_first()[group * lane_.ranks + source] = row;
        row += call_.counts[group * lane_.ranks + source];
      }
    }
  }

  __device__ void end(std::int64_t rows) const {
    if (threadIdx.x != 0) return;
    state_->rows = rows;
    state_->tokens = static_cast<std::int32_t>(rows_.tokens);
  }

  const PlanReturnArguments& arguments_;
  const ReturnedRows<LaneView> rows_;
  const LaneView& lane_;
  const PlanReturnCall& call_;
  ReturnState* const state_;
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
