// The rows of every expert and source, from the counts of all ranks: prefix sums, which each block makes for
// itself as soon as it has the letters.
#pragma once

#include "cuda/dispatch.hpp"
#include "cuda/findings.cuh"
#include "cuda/letters.cuh"
#include "cuda/routing.cuh"

namespace ferry::cuda {

__device__ inline std::int64_t align_rows(std::int64_t rows, std::int64_t alignment) {
  return (rows + alignment - 1) / alignment * alignment;
}

// In a block's shared memory. Groups are this rank's experts; rank_major: the source ranks.
struct Places {
  std::int32_t* from_me;  // [E] by position: the first row there of routes from this rank; rank_major: [R]
  std::int32_t* here;     // [G, R] first row here of (group, source); rank_major: [R]
  std::int32_t* begin;    // [G+1] first row of a group, then the total
  std::int32_t* count;    // [G] rows of a group
  std::int32_t* between;  // [R, R] messages from a rank to a rank
  std::uint32_t* offset;  // [E+1] aligned rows of all positions before this one, over all ranks

  __host__ __device__ static constexpr std::int64_t most(std::int64_t one, std::int64_t other) {
    return one > other ? one : other;
  }
  // `groups`: of this rank.
  __host__ __device__ static constexpr std::int64_t bytes(int experts, int ranks, int groups,
                                                          bool rank_major) {
    const std::int64_t here = rank_major ? ranks : std::int64_t{groups} * ranks;
    return 4 * (most(experts, ranks) + here + 2 * groups + 1 + std::int64_t{ranks} * ranks + experts + 1);
  }
  __device__ static Places at(std::byte* memory, int experts, int ranks, int groups, bool rank_major) {
    Places places;
    places.from_me = reinterpret_cast<std::int32_t*>(memory);
    places.here = places.from_me + most(experts, ranks);
    places.begin = places.here + (rank_major ? ranks : groups * ranks);
    places.count = places.begin + groups + 1;
    places.between = places.count + groups;
    places.offset = reinterpret_cast<std::uint32_t*>(places.between + ranks * ranks);
    return places;
  }
};

// Beside the places, in shared memory: what a block of threads computes them with.
struct PlacesScratch {
  std::uint32_t warp_sum[32];
  unsigned long long needed[kMaxRanks];  // rows a rank would need
  unsigned long long dropped;

  // By the whole block; a barrier follows.
  __device__ void prepare() {
    if (threadIdx.x < kMaxRanks) needed[threadIdx.x] = 0;
    if (threadIdx.x == 0) dropped = 0;
  }
};

// Exclusive prefix sum over the block's threads. All threads call it.
__device__ inline std::uint32_t exclusive_sum(std::uint32_t value, PlacesScratch* scratch) {
  const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::uint32_t inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(~0u, inclusive, step);
    if (thread >= step) inclusive += other;
  }
  if (thread == 31) scratch->warp_sum[warp] = inclusive;
  __syncthreads();
  std::uint32_t before = 0;
  for (int w = 0; w < warp; ++w) before += scratch->warp_sum[w];
  __syncthreads();
  return before + inclusive - value;
}

// Where counts come from: in a dispatch from ids the letters; otherwise the plan, where a count that no
// routing can have is none.
struct Counts {
  const DispatchArguments& call;
  const PlanView& plan;
  const RoutingTables& tables;
  std::uint64_t number;

  __device__ const LetterUnit* unit(int source, int i) const {
    const LaneView& lane = call.lane;
    return lane.letter(lane.rank, static_cast<int>(number & 1), source) + kLetterCounts + i;
  }
  // Waits for word `i` of the counts of `source`, of which `seen` is a first look. False: the call has ended
  // early.
  __device__ bool await(int source, int i, const LetterUnit& seen, std::uint64_t* word) const {
    *word = seen.word;
    return seen.call >= number || wait_for_unit(call.lane, unit(source, i),
                                                {Operation::dispatch, number, source}, word) == Came::yes;
  }
  __device__ bool await_messages(int source, int destination, std::int32_t* messages) const {
    const LaneView& lane = call.lane;
    if (call.replay) {
      const std::int64_t where = std::int64_t{source} * lane.ranks + destination;
      const std::int32_t count = plan.tokens_between[where];
      *messages = usable(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
      return true;
    }
    const int at = lane.signals.first_messages() + destination;
    std::uint64_t word = 0;
    const bool came = await(source, at / 2, load_unit_relaxed_sys(unit(source, at / 2)), &word);
    *messages = static_cast<std::int32_t>(at % 2 == 0 ? word : word >> 32);
    return came;
  }
  __device__ std::int32_t planned_routes(int source, int position) const {
    const LaneView& lane = call.lane;
    const std::int64_t where = std::int64_t{source} * lane.experts + tables.expert_at[position];
    const std::int32_t count = plan.counts[where];
    return usable(lane, count, std::int64_t{lane.max_tokens} * lane.top_k + 1, where) ? count : 0;
  }
};

// A thread's two positions: routes of all sources to each, and of the sources before this rank.
struct PositionSums {
  std::int32_t all[2] = {}, before[2] = {};
};

// Adds what `source` has for position 2 * thread + i; `keeps`: the plan keeps it.
__device__ __forceinline__ void add_routes(const Counts& counts, const Places& places, int source, int i,
                                           std::int32_t routes, bool keeps, PositionSums* sums) {
  const LaneView& lane = counts.call.lane;
  const int position = 2 * static_cast<int>(threadIdx.x) + i;
  if (position >= lane.experts) return;
  sums->all[i] += routes;
  if (source < lane.rank) sums->before[i] += routes;
  const int group = position - counts.tables.first_expert[lane.rank];
  // Until the places are known, what they are computed from.
  if (lane.layout != Layout::rank_major && counts.tables.rank_of[position] == lane.rank)
    places.here[group * lane.ranks + source] = routes;
  if (keeps) counts.plan.counts[source * lane.experts + counts.tables.expert_at[position]] = routes;
}

// The sums of this thread's positions. False: the call has ended early.
__device__ __forceinline__ bool sum_routes(const Counts& counts, const Places& places, bool keeps,
                                           PositionSums* sums) {
  constexpr int kAtOnce = 4;
  const LaneView& lane = counts.call.lane;
  const int pair = static_cast<int>(threadIdx.x);
  if (2 * pair >= lane.experts) return true;
  bool came = true;
#pragma unroll 1
  for (int first = 0; first < lane.ranks; first += kAtOnce) {
    LetterUnit seen[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!counts.call.replay && first + i < lane.ranks)
        seen[i] = load_unit_relaxed_sys(counts.unit(first + i, pair));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int source = first + i;
      if (source >= lane.ranks) continue;
      std::int32_t routes[2];
      if (counts.call.replay) {
        routes[0] = counts.planned_routes(source, 2 * pair);
        routes[1] = 2 * pair + 1 < lane.experts ? counts.planned_routes(source, 2 * pair + 1) : 0;
      } else {
        std::uint64_t word = 0;
        came = counts.await(source, pair, seen[i], &word) && came;
        routes[0] = static_cast<std::int32_t>(word), routes[1] = static_cast<std::int32_t>(word >> 32);
      }
      add_routes(counts, places, source, 0, routes[0], keeps, sums);
      add_routes(counts, places, source, 1, routes[1], keeps, sums);
    }
  }
  return came;
}

// The aligned rows before each position. By the whole block.
__device__ __forceinline__ void sum_positions(const LaneView& lane, const Places& places,
                                              const PositionSums& sums, PlacesScratch* scratch) {
  const int first = 2 * static_cast<int>(threadIdx.x);
  const auto rows = static_cast<std::uint32_t>(align_rows(sums.all[0], lane.alignment)),
             more = static_cast<std::uint32_t>(align_rows(sums.all[1], lane.alignment));
  // Sums over all ranks may come round; the difference of two of one rank is right all the same.
  const std::uint32_t offset = exclusive_sum(rows + more, scratch);
  if (first < lane.experts) places.offset[first] = offset;
  if (first + 1 < lane.experts) places.offset[first + 1] = offset + rows;
}

// Rows of position `p`, once the sums are there.
__device__ __forceinline__ void place_expert(const LaneView& lane, const RoutingTables& tables,
                                             const Places& places, int p, std::int32_t all,
                                             std::int32_t before, PlacesScratch* scratch) {
  const bool padded = lane.layout == Layout::expert_padded;
  const int rank = tables.rank_of[p], group = p - tables.first_expert[rank];
  const std::int64_t capacity = tables.capacity[rank];
  const std::int64_t offset = padded ? 0 : places.offset[p] - places.offset[tables.first_expert[rank]];
  places.from_me[p] = static_cast<std::int32_t>(min(offset + before, capacity));
  const std::int64_t kept = max(std::int64_t{0}, min(capacity - offset, std::int64_t{all}));
  if (all > kept) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(all - kept));
  const auto needed = static_cast<unsigned long long>(align_rows(offset + all, lane.alignment));
  if (padded) {
    atomicMax(&scratch->needed[rank], needed);
  } else if (p + 1 == tables.first_expert[rank + 1]) {
    scratch->needed[rank] = needed;  // offsets grow: the last expert's rows end last
  }
  if (rank != lane.rank) return;
  places.count[group] = static_cast<std::int32_t>(kept);
  places.begin[group] = static_cast<std::int32_t>(padded ? group * capacity : min(offset, capacity));
  std::int64_t row = offset;
#pragma unroll 1
  for (int source = 0; source < lane.ranks; ++source) {
    std::int32_t& here = places.here[group * lane.ranks + source];
    const std::int32_t routes = here;
    here = static_cast<std::int32_t>(min(row, capacity));
    row += routes;
  }
}

__device__ inline void place_ranks(const LaneView& lane, const RoutingTables& tables, const Places& places,
                                   PlacesScratch* scratch) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= lane.ranks) return;
  const std::int64_t capacity = tables.capacity[rank];
  std::int64_t row = 0;
  for (int source = 0; source < lane.ranks; ++source) {
    const std::int64_t first = min(row, capacity), messages = places.between[source * lane.ranks + rank];
    if (source == lane.rank) places.from_me[rank] = static_cast<std::int32_t>(first);
    row += messages;
    if (rank != lane.rank) continue;
    places.here[source] = static_cast<std::int32_t>(first);
    places.count[source] = static_cast<std::int32_t>(min(capacity - first, messages));
    places.begin[source] = static_cast<std::int32_t>(first);
  }
  scratch->needed[rank] = static_cast<unsigned long long>(row);
  if (row > capacity) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(row - capacity));
}

// By the whole block: all places, as soon as the counts are here. False, on all threads alike: the call has
// ended early. `good`: whether the caller's part has gone well so far. `keeps`: the plan keeps the counts,
// and the lane its load.
__device__ inline bool find_places(const Counts& counts, const Places& places, PlacesScratch* scratch,
                                   bool good, bool keeps) {
  const LaneView& lane = counts.call.lane;
  const RoutingTables& tables = counts.tables;
  // By warps that have few experts, where there are few.
  for (unsigned i = (threadIdx.x + blockDim.x / 2) % blockDim.x;
       i < static_cast<unsigned>(lane.ranks * lane.ranks); i += blockDim.x)
    good = counts.await_messages(static_cast<int>(i) / lane.ranks, static_cast<int>(i) % lane.ranks,
                                 &places.between[i]) &&
           good;
  // Waited for in rank_major too: the plan keeps them.
  PositionSums sums;
  good = sum_routes(counts, places, keeps, &sums) && good;
  sum_positions(lane, places, sums, scratch);
  if (__syncthreads_and(static_cast<int>(good)) == 0) return false;
  const int first = 2 * static_cast<int>(threadIdx.x);
  if (lane.layout == Layout::rank_major) {
    place_ranks(lane, tables, places, scratch);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + i < lane.experts)
        place_expert(lane, tables, places, first + i, sums.all[i], sums.before[i], scratch);
    }
  }
  for (int i = 0; i < 2 && keeps && first + i < lane.experts; ++i)
    lane.load[tables.expert_at[first + i]] += sums.all[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto needed = static_cast<std::int64_t>(scratch->needed[lane.rank]);
    const std::int64_t total =
        lane.layout == Layout::expert_padded ? lane.groups * lane.capacity : min(needed, lane.capacity);
    places.begin[lane.groups] = static_cast<std::int32_t>(total);
  }
  __syncthreads();
  return true;
}

// The rank that needs the most rows of those that overflow, the lowest of equals.
static __device__ __noinline__ Overflow worst_overflow(const LaneView& lane, const RoutingTables& tables,
                                                       const PlacesScratch& scratch) {
  Overflow worst;
  for (int rank = 0; rank < lane.ranks; ++rank) {
    const auto needed = static_cast<std::int64_t>(scratch.needed[rank]);
    if (needed <= tables.capacity[rank] || needed <= worst.needed) continue;
    worst.rank = rank;
    worst.capacity = tables.capacity[rank];
    worst.needed = needed;
  }
  worst.dropped = static_cast<std::int64_t>(scratch.dropped);
  return worst;
}

// Row of a route of this rank on its expert's rank, or -1: masked, or past the capacity. `ordinal`: of the
// route; rank_major: the number of its message.
__device__ __forceinline__ std::int32_t row_of_route(const LaneView& lane, const RoutingTables& tables,
                                                     const Places& places, int position, int rank,
                                                     std::int32_t ordinal) {
  if (position < 0) return -1;
  const std::int64_t capacity = tables.capacity[rank];
  const int from = lane.layout == Layout::rank_major ? rank : position;
  const std::int64_t row = std::int64_t{places.from_me[from]} + ordinal;
  if (row >= capacity) return -1;
  const int group = position - tables.first_expert[rank];
  return static_cast<std::int32_t>(lane.layout == Layout::expert_padded ? group * capacity + row : row);
}

__device__ inline std::int64_t messages_between(const LaneView& lane, const PlanView& plan, int source,
                                                int destination) {
  const std::int64_t where = std::int64_t{source} * lane.ranks + destination;
  const std::int64_t count = plan.tokens_between[where];
  return usable(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
}

}  // namespace ferry::cuda
