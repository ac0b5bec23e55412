// The rows of every expert and source, from the counts of all ranks: prefix sums, which each block makes for
// itself as soon as it has the letters.
#pragma once

#include "cuda/dispatch.hpp"
#include "cuda/findings.cuh"
#include "cuda/letters.cuh"
#include "cuda/routing.cuh"

namespace ferry::cuda {

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

// Exclusive prefix sum over the block's threads. All threads call it; a barrier before the next one. False:
// not all are `good`.
__device__ __forceinline__ bool exclusive_sum(std::uint32_t value, bool good, PlacesScratch* scratch,
                                              std::uint32_t* sum) {
  const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::uint32_t inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(~0u, inclusive, step);
    if (thread >= step) inclusive += other;
  }
  if (thread == 31) scratch->warp_sum[warp] = inclusive;
  const bool all_good = __syncthreads_and(static_cast<int>(good)) != 0;
  *sum = __reduce_add_sync(~0u, thread < warp ? scratch->warp_sum[thread] : 0) + inclusive - value;
  return all_good;
}

inline constexpr int kLettersAtOnce = 4;  // words on their way to a thread

// Where counts come from: in a dispatch from ids the letters; otherwise the plan, where a count that no
// routing can have is none.
struct Counts {
  const DispatchArguments& call;
  RoutingTables tables;
  std::uint64_t number;

  // Calls use(source, word) for word `i` of the counts of every rank in order, each waited for. False: the
  // call has ended early.
  template <class Use>
  __device__ __forceinline__ bool each(int i, Use use) const {
    const LaneView& lane = call.lane;
    const int ranks = lane.ranks;
    const LetterUnit* letter = lane.letter(lane.rank, static_cast<int>(number & 1), 0) + kLetterCounts + i;
    const std::int64_t step = lane.signals.letter_bytes / static_cast<std::int64_t>(sizeof(LetterUnit));
#pragma unroll 1
    for (int first = 0; first < ranks; first += kLettersAtOnce, letter += kLettersAtOnce * step) {
      LetterUnit seen[kLettersAtOnce];
#pragma unroll 1
      for (unsigned looks = 0;; ++looks) {
        bool here = true;
#pragma unroll
        for (int s = 0; s < kLettersAtOnce; ++s) {
          seen[s] = {number, 0};
          if (first + s < ranks) seen[s] = load_unit_relaxed_sys(letter + s * step);
          here = here && seen[s].call >= number;
        }
        if (here) break;
        if (looks >= kQuickLooks && !await(first, i)) return false;
      }
#pragma unroll
      for (int s = 0; s < kLettersAtOnce; ++s) {
        if (first + s < ranks) use(first + s, seen[s].word);
      }
    }
    return true;
  }
  // The long wait for word `i` of some letters from `first` on. What is held across it lies in memory.
  __device__ bool await(int first, int i) const {
    const LaneView& lane = call.lane;
    const int end = min(first + kLettersAtOnce, lane.ranks);
    for (int source = first; source < end; ++source) {
      const LetterUnit* unit =
          lane.letter(lane.rank, static_cast<int>(number & 1), source) + kLetterCounts + i;
      if (wait_long(lane, &unit->call, nullptr, {Operation::dispatch, number, source}) != Came::yes)
        return false;
    }
    return true;
  }
  // Messages from every rank to `destination`, to places.between.
  __device__ __forceinline__ bool messages_to(int destination, std::int32_t* between) const {
    const LaneView& lane = call.lane;
    if (call.replay) {
      for (int source = 0; source < lane.ranks; ++source) {
        const int where = source * lane.ranks + destination;
        const std::int32_t count = call.plan.tokens_between[where];
        between[where] = usable(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
      }
      return true;
    }
    const int at = lane.signals.first_messages + destination;
    return each(at / 2, [&](int source, std::uint64_t word) {
      between[source * lane.ranks + destination] = static_cast<std::int32_t>(at % 2 == 0 ? word : word >> 32);
    });
  }
  __device__ std::int32_t planned_routes(int source, int expert) const {
    const LaneView& lane = call.lane;
    const std::int64_t where = std::int64_t{source} * lane.experts + expert;
    const std::int32_t count = call.plan.counts[where];
    return usable(lane, count, std::int64_t{lane.max_tokens} * lane.top_k + 1, where) ? count : 0;
  }
};

// One of a thread's two positions: what the tables say of it, then the routes of all sources to it, and of
// the sources before this rank.
struct Position {
  int expert = -1;  // -1: there is no such position
  int rank = 0;
  std::int32_t* here = nullptr;  // [R] of this rank's experts: first the routes of each source, then its row
  std::int32_t all = 0, before = 0;

  __device__ __forceinline__ static Position of(const LaneView& lane, const RoutingTables& tables,
                                                const Places& places, int p, bool exists) {
    Position position;
    if (!exists) return position;
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

// Adds up the routes to this thread's positions. False: the call has ended early.
__device__ __forceinline__ bool sum_routes(const Counts& counts, int first, bool keeps,
                                           Position (&position)[2]) {
  const LaneView& lane = counts.call.lane;
  if (position[0].expert < 0 && position[1].expert < 0) return true;
  std::int32_t* const kept = keeps ? counts.call.plan.counts : nullptr;
  if (!counts.call.replay) {
    return counts.each(first / 2, [&](int source, std::uint64_t word) {
      position[0].add(lane, source, static_cast<std::int32_t>(word), kept);
      position[1].add(lane, source, static_cast<std::int32_t>(word >> 32), kept);
    });
  }
  for (int source = 0; source < lane.ranks; ++source) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (position[i].expert >= 0)
        position[i].add(lane, source, counts.planned_routes(source, position[i].expert), kept);
    }
  }
  return true;
}

// Rows of position `p`. `offset`: aligned rows of its rank's positions before it. Counts of a damaged plan
// may be so many that sums come round: what is stored stays within the capacity all the same.
__device__ __forceinline__ void place_expert(const LaneView& lane, const RoutingTables& tables,
                                             const Places& places, const Position& at, int p,
                                             std::uint32_t offset, std::uint32_t aligned,
                                             PlacesScratch* scratch, bool keeps) {
  const bool padded = lane.layout == Layout::expert_padded;
  const int first = tables.first_expert[at.rank], end = tables.first_expert[at.rank + 1], group = p - first;
  const auto capacity = static_cast<std::uint32_t>(tables.capacity[at.rank]);
  if (padded) offset = 0;
  places.from_me[p] =
      static_cast<std::int32_t>(min(offset + static_cast<std::uint32_t>(at.before), capacity));
  const std::uint32_t begin = min(offset, capacity), all = static_cast<std::uint32_t>(at.all),
                      kept = min(capacity - begin, all), needed = offset + aligned;
  if (keeps) {
    if (all > kept) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(all - kept));
    if (!padded && p + 1 == end) {
      scratch->needed[at.rank] = needed;  // offsets grow: the last ends last
    } else if (padded && needed > capacity) {
      atomicMax(&scratch->needed[at.rank], static_cast<unsigned long long>(needed));
    }
  }
  if (at.rank != lane.rank) return;
  places.count[group] = static_cast<std::int32_t>(kept);
  places.begin[group] =
      static_cast<std::int32_t>(padded ? static_cast<std::uint32_t>(group) * capacity : begin);
  if (p + 1 == end)
    places.begin[lane.groups] = static_cast<std::int32_t>(
        padded ? static_cast<std::uint32_t>(lane.groups) * capacity : min(needed, capacity));
  std::uint32_t row = offset;
  const int ranks = lane.ranks;
#pragma unroll 1
  for (int source = 0; source < ranks; source += 4) {
    std::int32_t routes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) routes[i] = source + i < ranks ? at.here[source + i] : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (source + i < ranks) at.here[source + i] = static_cast<std::int32_t>(min(row, capacity));
      row += static_cast<std::uint32_t>(routes[i]);
    }
  }
}

__device__ __forceinline__ void place_ranks(const LaneView& lane, const RoutingTables& tables,
                                            const Places& places, bool all, PlacesScratch* scratch) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= lane.ranks || (rank != lane.rank && !all)) return;
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
  if (rank == lane.rank) places.begin[lane.groups] = static_cast<std::int32_t>(min(row, capacity));
  scratch->needed[rank] = static_cast<unsigned long long>(row);
  if (row > capacity) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(row - capacity));
}

// By the whole block: places, as soon as the counts are here; `all`: at every rank, which only those that
// send ask for, otherwise at this one. False, on all threads alike: the call has ended early. `good`: whether
// the caller's part has gone well so far. `keeps`: the plan keeps the counts, and the lane its load.
__device__ __forceinline__ bool find_places(const Counts& counts, const Places& places,
                                            PlacesScratch* scratch, bool good, bool all, bool keeps) {
  const LaneView& lane = counts.call.lane;
  const RoutingTables& tables = counts.tables;
  const bool rank_major = lane.layout == Layout::rank_major;
  const int begin = all ? 0 : tables.first_expert[lane.rank], thread = static_cast<int>(threadIdx.x),
            end = all ? lane.experts : tables.first_expert[lane.rank + 1], first = begin / 2 * 2 + 2 * thread;
  // By the last warp but one, which has few experts, if any.
  const int destination = thread - (kBlockThreads - 64);
  if (destination >= 0 && destination < lane.ranks && (all || destination == lane.rank))
    good = counts.messages_to(destination, places.between) && good;
  // Waited for in rank_major too by the block that keeps them.
  const bool wants = !rank_major || keeps;
  Position position[2] = {Position::of(lane, tables, places, first, wants && first >= begin && first < end),
                          Position::of(lane, tables, places, first + 1, wants && first + 1 < end)};
  good = sum_routes(counts, first, keeps, position) && good;
  const auto rows = static_cast<std::uint32_t>(lane.by_alignment.round_up(position[0].all)),
             more = static_cast<std::uint32_t>(lane.by_alignment.round_up(position[1].all));
  std::uint32_t offset;
  if (!exclusive_sum(rows + more, good, scratch, &offset)) return false;
  if (!rank_major) {
    std::uint32_t base[2] = {0, 0};
    if (all) {
      // Sums over all ranks may come round; the difference of two of one rank is right all the same.
      if (first < end) places.offset[first] = offset;
      if (first + 1 < end) places.offset[first + 1] = offset + rows;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (position[i].expert >= 0) base[i] = places.offset[tables.first_expert[position[i].rank]];
      }
    }
    if (position[0].expert >= 0)
      place_expert(lane, tables, places, position[0], first, offset - base[0], rows, scratch, keeps);
    if (position[1].expert >= 0)
      place_expert(lane, tables, places, position[1], first + 1, offset + rows - base[1], more, scratch,
                   keeps);
    if (lane.groups == 0 && thread == 0) places.begin[0] = 0;
  } else {
    place_ranks(lane, tables, places, all, scratch);
  }
#pragma unroll
  for (int i = 0; i < 2 && keeps; ++i) {
    // One rank's calls of a lane come one after the other; an addition without an answer is not waited for.
    if (position[i].expert >= 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(lane.load + position[i].expert),
                static_cast<unsigned long long>(position[i].all));
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
