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

// Exclusive prefix sum over the block's threads. All threads call it; a barrier before the next one.
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
  const std::uint32_t before = __reduce_add_sync(~0u, thread < warp ? scratch->warp_sum[thread] : 0);
  return before + inclusive - value;
}

inline constexpr int kLettersAtOnce = 4;  // words on their way to a thread

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
  // Waits for word `i` of the counts of `source`. False: the call has ended early.
  __device__ bool await(int source, int i) const {
    return wait_for(call.lane, &unit(source, i)->call, nullptr, {Operation::dispatch, number, source}) ==
           Came::yes;
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
    LetterUnit seen = load_unit_relaxed_sys(unit(source, at / 2));
    if (seen.call < number) {
      if (!await(source, at / 2)) return false;
      seen = load_unit_relaxed_sys(unit(source, at / 2));
    }
    *messages = static_cast<std::int32_t>(at % 2 == 0 ? seen.word : seen.word >> 32);
    return true;
  }
  // Word `i` of the next letters from `first` on.
  __device__ __forceinline__ void look(int first, int i, LetterUnit (&seen)[kLettersAtOnce]) const {
#pragma unroll
    for (int s = 0; s < kLettersAtOnce; ++s) {
      seen[s] = {};
      if (first + s < call.lane.ranks) seen[s] = load_unit_relaxed_sys(unit(first + s, i));
    }
  }
  // Waits for word `i` of all letters. False: the call has ended early. Apart from what is done with the
  // words, which is read again then: what is held across a wait lies in memory.
  __device__ __forceinline__ bool await_all(int i) const {
    const int ranks = call.lane.ranks;
#pragma unroll 1
    for (int first = 0; first < ranks; first += kLettersAtOnce) {
      LetterUnit seen[kLettersAtOnce];
      look(first, i, seen);
      std::uint32_t missing = 0;
#pragma unroll
      for (int s = 0; s < kLettersAtOnce; ++s)
        missing |= first + s < ranks && seen[s].call < number ? 1u << s : 0;
      for (; missing != 0; missing &= missing - 1) {
        if (!await(first + __ffs(static_cast<int>(missing)) - 1, i)) return false;
      }
    }
    return true;
  }
  __device__ std::int32_t planned_routes(int source, int expert) const {
    const LaneView& lane = call.lane;
    const std::int64_t where = std::int64_t{source} * lane.experts + expert;
    const std::int32_t count = plan.counts[where];
    return usable(lane, count, std::int64_t{lane.max_tokens} * lane.top_k + 1, where) ? count : 0;
  }
};

// One of a thread's two positions: what the tables say of it, looked up before the counts are here, then the
// routes of all sources to it, and of the sources before this rank.
struct Position {
  int expert = -1;  // -1: there is no such position
  int rank = 0;
  std::int32_t* here = nullptr;  // routes of each source to it, where places are computed from them
  std::int32_t all = 0, before = 0;

  __device__ __forceinline__ static Position of(const LaneView& lane, const RoutingTables& tables,
                                                const Places& places, int p) {
    Position position;
    if (p >= lane.experts) return position;
    position.expert = tables.expert_at[p];
    position.rank = tables.rank_of[p];
    if (position.rank == lane.rank && lane.layout != Layout::rank_major)
      position.here = places.here + (p - tables.first_expert[lane.rank]) * lane.ranks;
    return position;
  }
  // `keeps`: the plan's counts, if it keeps them.
  __device__ __forceinline__ void add(const LaneView& lane, int source, std::int32_t routes,
                                      std::int32_t* keeps) {
    if (expert < 0) return;
    all += routes;
    if (source < lane.rank) before += routes;
    if (here != nullptr) here[source] = routes;
    if (keeps != nullptr) keeps[source * lane.experts + expert] = routes;
  }
};

// Adds up the routes to this thread's positions, whose words are here. False: they are not.
__device__ __forceinline__ bool sum_routes(const Counts& counts, bool keeps, Position (&position)[2]) {
  const LaneView& lane = counts.call.lane;
  const int pair = static_cast<int>(threadIdx.x), ranks = lane.ranks;
  if (position[0].expert < 0) return true;
  bool here = true;
  std::int32_t* const kept = keeps ? counts.plan.counts : nullptr;
  const bool replay = counts.call.replay;
#pragma unroll 1
  for (int first = 0; first < ranks; first += kLettersAtOnce) {
    LetterUnit seen[kLettersAtOnce] = {};
    if (!replay) counts.look(first, pair, seen);
#pragma unroll
    for (int i = 0; i < kLettersAtOnce; ++i) {
      const int source = first + i;
      if (source >= ranks) continue;
      // The word that came with the number in one access.
      here = here && (replay || seen[i].call >= counts.number);
      std::int32_t routes[2] = {static_cast<std::int32_t>(seen[i].word),
                                static_cast<std::int32_t>(seen[i].word >> 32)};
      if (replay) {
        routes[0] = counts.planned_routes(source, position[0].expert);
        if (position[1].expert >= 0) routes[1] = counts.planned_routes(source, position[1].expert);
      }
      position[0].add(lane, source, routes[0], kept);
      position[1].add(lane, source, routes[1], kept);
    }
  }
  return here;
}

// The aligned rows before each position. By the whole block.
__device__ __forceinline__ void sum_positions(const LaneView& lane, const Places& places,
                                              const Position (&position)[2], PlacesScratch* scratch) {
  const int first = 2 * static_cast<int>(threadIdx.x);
  const auto rows = static_cast<std::uint32_t>(align_rows(position[0].all, lane.alignment)),
             more = static_cast<std::uint32_t>(align_rows(position[1].all, lane.alignment));
  // Sums over all ranks may come round; the difference of two of one rank is right all the same.
  const std::uint32_t offset = exclusive_sum(rows + more, scratch);
  if (first < lane.experts) places.offset[first] = offset;
  if (first + 1 < lane.experts) places.offset[first + 1] = offset + rows;
}

// Rows of position `p`, once the sums are there.
__device__ __forceinline__ void place_expert(const LaneView& lane, const RoutingTables& tables,
                                             const Places& places, const Position& at, int p,
                                             PlacesScratch* scratch) {
  const bool padded = lane.layout == Layout::expert_padded;
  const int first = tables.first_expert[at.rank], end = tables.first_expert[at.rank + 1], group = p - first;
  const std::int64_t capacity = tables.capacity[at.rank];
  const std::int64_t offset = padded ? 0 : places.offset[p] - places.offset[first];
  places.from_me[p] = static_cast<std::int32_t>(min(offset + at.before, capacity));
  const std::int64_t kept = max(std::int64_t{0}, min(capacity - offset, std::int64_t{at.all}));
  if (at.all > kept) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(at.all - kept));
  const std::int64_t needed = align_rows(offset + at.all, lane.alignment);
  if (!padded && p + 1 == end) {
    scratch->needed[at.rank] = static_cast<unsigned long long>(needed);  // offsets grow: the last ends last
  } else if (padded && needed > capacity) {
    atomicMax(&scratch->needed[at.rank], static_cast<unsigned long long>(needed));
  }
  if (at.rank != lane.rank) return;
  places.count[group] = static_cast<std::int32_t>(kept);
  places.begin[group] = static_cast<std::int32_t>(padded ? group * capacity : min(offset, capacity));
  std::int64_t row = offset;
  const int ranks = lane.ranks;
#pragma unroll 1
  for (int source = 0; source < ranks; source += 4) {
    std::int32_t routes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) routes[i] = source + i < ranks ? at.here[source + i] : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (source + i < ranks) at.here[source + i] = static_cast<std::int32_t>(min(row, capacity));
      row += routes[i];
    }
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
  const int first = 2 * static_cast<int>(threadIdx.x);
  // By warps that have few experts, where there are few.
  for (unsigned i = (threadIdx.x + blockDim.x / 2) % blockDim.x;
       i < static_cast<unsigned>(lane.ranks * lane.ranks); i += blockDim.x)
    good = counts.await_messages(static_cast<int>(i) / lane.ranks, static_cast<int>(i) % lane.ranks,
                                 &places.between[i]) &&
           good;
  // Waited for in rank_major too: the plan keeps them.
  if (!counts.call.replay && first < lane.experts)
    good = counts.await_all(static_cast<int>(threadIdx.x)) && good;
  Position position[2] = {Position::of(lane, tables, places, first),
                          Position::of(lane, tables, places, first + 1)};
  good = good && sum_routes(counts, keeps, position);
  sum_positions(lane, places, position, scratch);
  if (__syncthreads_and(static_cast<int>(good)) == 0) return false;
  if (lane.layout == Layout::rank_major) {
    place_ranks(lane, tables, places, scratch);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (position[i].expert >= 0) place_expert(lane, tables, places, position[i], first + i, scratch);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 && keeps; ++i) {
    // One rank's calls of a lane come one after the other; an addition without an answer is not waited for.
    if (position[i].expert >= 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(lane.load + position[i].expert),
                static_cast<unsigned long long>(position[i].all));
  }
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
