// The rows of every expert and source, from the counts of all ranks: prefix sums by one block.
#pragma once

#include "cuda/dispatch.hpp"
#include "cuda/findings.cuh"

namespace ferry::cuda {

// Shared memory of the computation.
struct PlacesScratch {
  unsigned long long needed[kMaxRanks];  // rows a rank would need
  unsigned long long dropped;
  std::int64_t warp_sum[32];
  std::int64_t capacity[kMaxRanks];  // of a rank's groups
  std::int32_t first_expert[kMaxRanks + 1];
  std::int32_t expert_at[kMaxExperts];
  std::int64_t offset[kMaxExperts];  // aligned rows of all experts before this one, over all ranks

  // By the whole block, before counts are there: what does not depend on them. A barrier follows.
  __device__ void prepare(const LaneView& lane) {
    for (int rank = threadIdx.x; rank <= lane.ranks; rank += blockDim.x) {
      first_expert[rank] = lane.first_expert[rank];
      if (rank == lane.ranks) continue;
      capacity[rank] = lane.group_capacities[rank];
      needed[rank] = 0;
    }
    for (int p = threadIdx.x; p < lane.experts; p += blockDim.x) expert_at[p] = lane.expert_at[p];
    if (threadIdx.x == 0) dropped = 0;
  }
};

__device__ inline std::int64_t align_rows(std::int64_t rows, std::int64_t alignment) {
  return (rows + alignment - 1) / alignment * alignment;
}

// Exclusive prefix sum over the block's threads; `*sum` is that of all. All threads call it.
__device__ inline std::int64_t exclusive_sum(std::int64_t value, PlacesScratch* scratch, std::int64_t* sum) {
  const int thread = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  std::int64_t inclusive = value;
  for (int step = 1; step < 32; step *= 2) {
    const std::int64_t other = __shfl_up_sync(~0u, inclusive, step);
    if (thread >= step) inclusive += other;
  }
  if (thread == 31) scratch->warp_sum[warp] = inclusive;
  __syncthreads();
  std::int64_t before = 0, all = 0;
  for (int w = 0; w < warps; ++w) {
    if (w == warp) before = all;
    all += scratch->warp_sum[w];
  }
  __syncthreads();
  *sum = all;
  return before + inclusive - value;
}

// Where counts come from: in a dispatch from ids the letters, which become part of the plan; otherwise the
// plan, where a count that no routing can have is none.
struct Counts {
  const DispatchArguments& call;
  const PlanView& plan;
  int generation;

  __device__ std::int64_t routes(int source, int expert) const {
    const LaneView& lane = call.lane;
    if (!call.replay) return lane.letter_counts(lane.rank, generation, source)[expert];
    const std::int64_t where = std::int64_t{source} * lane.experts + expert, count = plan.counts[where];
    return usable(lane, count, std::int64_t{lane.max_tokens} * lane.top_k + 1, where) ? count : 0;
  }
  __device__ std::int64_t messages(int source, int destination) const {
    const LaneView& lane = call.lane;
    if (!call.replay) return lane.letter_counts(lane.rank, generation, source)[lane.experts + destination];
    const std::int64_t where = std::int64_t{source} * lane.ranks + destination,
                       count = plan.tokens_between[where];
    return usable(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
  }
};

__device__ inline std::int64_t messages_between(const LaneView& lane, const PlanView& plan, int source,
                                                int destination) {
  const std::int64_t where = std::int64_t{source} * lane.ranks + destination;
  const std::int64_t count = plan.tokens_between[where];
  return usable(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
}

// scratch->offset[p] = aligned rows of all experts before position p of expert_at, over all ranks. Keeps the
// counts in the plan.
__device__ inline void compute_offsets(const DispatchArguments& call, const Counts& counts,
                                       const PlanView& plan, PlacesScratch* scratch) {
  const LaneView& lane = call.lane;
  std::int64_t carry = 0;
  for (int base = 0; base < lane.experts; base += static_cast<int>(blockDim.x)) {
    const int p = base + static_cast<int>(threadIdx.x);
    std::int64_t rows = 0;
    if (p < lane.experts) {
      const int expert = scratch->expert_at[p];
#pragma unroll 4
      for (int source = 0; source < lane.ranks; ++source) {
        const std::int64_t count = counts.routes(source, expert);
        if (!call.replay) plan.counts[source * lane.experts + expert] = static_cast<std::int32_t>(count);
        rows += count;
      }
    }
    std::int64_t sum = 0;
    const std::int64_t before = exclusive_sum(align_rows(rows, lane.alignment), scratch, &sum);
    if (p < lane.experts) scratch->offset[p] = carry + before;
    carry += sum;
  }
  __syncthreads();
}

__device__ inline void place_experts(const DispatchArguments& call, const Counts& counts,
                                     const PlanView& plan, const std::uint8_t* rank_of,
                                     PlacesScratch* scratch) {
  const LaneView& lane = call.lane;
  const bool padded = lane.layout == Layout::expert_padded;
  compute_offsets(call, counts, plan, scratch);
  for (int p = threadIdx.x; p < lane.experts; p += blockDim.x) {
    const int expert = scratch->expert_at[p], rank = rank_of[expert];
    const std::int64_t capacity = scratch->capacity[rank];
    const std::int64_t offset =
        padded ? 0 : scratch->offset[p] - scratch->offset[scratch->first_expert[rank]];
    std::int64_t row = offset;
#pragma unroll 4
    for (int source = 0; source < lane.ranks; ++source) {
      lane.first_rows[std::int64_t{p} * lane.ranks + source] = static_cast<std::int32_t>(min(row, capacity));
      row += counts.routes(source, expert);
    }
    const std::int64_t routes = row - offset, kept = max(std::int64_t{0}, min(capacity - offset, routes));
    if (routes > kept) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(routes - kept));
    const auto needed = static_cast<unsigned long long>(align_rows(row, lane.alignment));
    if (padded) {
      atomicMax(&scratch->needed[rank], needed);
    } else if (p + 1 == scratch->first_expert[rank + 1]) {
      scratch->needed[rank] = needed;  // offsets grow: the last expert's rows end last
    }
    if (rank != lane.rank) continue;
    const int group = p - scratch->first_expert[rank];
    call.counts[group] = static_cast<std::int32_t>(kept);
    call.row_offsets[group] = static_cast<std::int32_t>(padded ? group * capacity : min(offset, capacity));
  }
}

__device__ inline void place_ranks(const DispatchArguments& call, const Counts& counts, const PlanView& plan,
                                   PlacesScratch* scratch) {
  const LaneView& lane = call.lane;
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < lane.ranks) {
    const std::int64_t capacity = scratch->capacity[rank];
    std::int64_t row = 0;
    for (int source = 0; source < lane.ranks; ++source) {
      const std::int64_t first = min(row, capacity), messages = counts.messages(source, rank);
      lane.first_rows[rank * lane.ranks + source] = static_cast<std::int32_t>(first);
      row += messages;
      if (rank != lane.rank) continue;
      call.counts[source] = static_cast<std::int32_t>(min(capacity - first, messages));
      call.row_offsets[source] = static_cast<std::int32_t>(first);
    }
    scratch->needed[rank] = static_cast<unsigned long long>(row);
    if (row > capacity) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(row - capacity));
  }
  if (call.replay) return;
  for (int expert = threadIdx.x; expert < lane.experts; expert += blockDim.x) {
    for (int source = 0; source < lane.ranks; ++source) {
      const std::int64_t count = counts.routes(source, expert);
      plan.counts[source * lane.experts + expert] = static_cast<std::int32_t>(count);
    }
  }
}

// The rank that needs the most rows of those that overflow, the lowest of equals.
__device__ inline Overflow worst_overflow(const LaneView& lane, const PlacesScratch& scratch) {
  Overflow worst;
  for (int rank = 0; rank < lane.ranks; ++rank) {
    const auto needed = static_cast<std::int64_t>(scratch.needed[rank]);
    if (needed <= scratch.capacity[rank] || needed <= worst.needed) continue;
    worst.rank = rank;
    worst.capacity = scratch.capacity[rank];
    worst.needed = needed;
  }
  worst.dropped = static_cast<std::int64_t>(scratch.dropped);
  return worst;
}

// By the whole block, when others need not wait any more: adds the call's routes to the lane's load.
__device__ inline void count_load(const DispatchArguments& call, const Counts& counts) {
  const LaneView& lane = call.lane;
  for (int expert = threadIdx.x; expert < lane.experts; expert += blockDim.x) {
    std::int64_t routes = 0;
#pragma unroll 4
    for (int source = 0; source < lane.ranks; ++source) routes += counts.routes(source, expert);
    lane.load[expert] += routes;
  }
}

// By one block with prepared scratch, when all letters are here: first rows of every expert and source, this
// rank's groups, the plan's counts. Returns the total to all threads.
__device__ inline std::int64_t compute_places(const DispatchArguments& call, const Counts& counts,
                                              const PlanView& plan, const std::uint8_t* rank_of,
                                              PlacesScratch* scratch) {
  const LaneView& lane = call.lane;
  if (!call.replay) {
    for (int i = threadIdx.x; i < lane.ranks * lane.ranks; i += blockDim.x)
      plan.tokens_between[i] = static_cast<std::int32_t>(counts.messages(i / lane.ranks, i % lane.ranks));
  }
  if (lane.layout == Layout::rank_major) {
    place_ranks(call, counts, plan, scratch);
  } else {
    place_experts(call, counts, plan, rank_of, scratch);
  }
  __syncthreads();
  const auto needed = static_cast<std::int64_t>(scratch->needed[lane.rank]);
  const int local = scratch->first_expert[lane.rank + 1] - scratch->first_expert[lane.rank];
  const int groups = lane.layout == Layout::rank_major ? lane.ranks : local;
  const std::int64_t total =
      lane.layout == Layout::expert_padded ? local * lane.capacity : min(needed, lane.capacity);
  if (threadIdx.x == 0) call.row_offsets[groups] = static_cast<std::int32_t>(total);
  return total;
}

// Row of a route of this rank on its expert's rank, or -1: past the capacity. `ordinal` as plan_places left
// it.
__device__ inline std::int32_t row_of_route(const LaneView& lane, int expert, std::int32_t ordinal) {
  const ExpertPlace place = lane.place[expert];
  const std::int64_t capacity = lane.group_capacities[place.rank];
  const std::int64_t at =
      lane.layout == Layout::rank_major ? place.rank : lane.first_expert[place.rank] + place.local;
  const std::int64_t row = std::int64_t{lane.first_rows[at * lane.ranks + lane.rank]} + ordinal;
  if (row >= capacity) return -1;
  return static_cast<std::int32_t>(lane.layout == Layout::expert_padded ? place.local * capacity + row : row);
}

}  // namespace ferry::cuda
