// The rows of every expert and source, from the counts of all ranks: prefix sums, which each block makes for
// itself as soon as it has the letters.
#pragma once

#include "backends/cuda/device/block_arrays.cuh"
#include "backends/cuda/device/kernel_traits.cuh"
#include "backends/cuda/dispatch/routing.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"

namespace ferry::cuda {

// Beside the places, in shared memory: what a block of threads computes them with.
struct ScanScratch {
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
__device__ __forceinline__ bool exclusive_scan(std::uint32_t value, bool good, ScanScratch* scratch,
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

inline constexpr int kHeadersAtOnce = 4;  // words on their way to a thread

// Where counts come from: in a dispatch from ids the letters; otherwise the plan, where a count that no
// routing can have is none.
template <class Traits>
struct Counts {
  const DispatchArguments& call;
  BlockTables tables;
  std::uint64_t number;

  // Calls use(source, word) for word `i` of the counts of every rank in order, each waited for. False: the
  // call has ended early.
  template <class Use>
  __device__ __forceinline__ bool each(int i, Use use) const {
    const LaneView& lane = call.lane;
    const int ranks = lane.ranks;
    const LLPacket* header = lane.header(lane.rank, static_cast<int>(number & 1), 0) + kHeaderCounts + i;
    const std::int64_t step = lane.signals.header_bytes / static_cast<std::int64_t>(sizeof(LLPacket));
#pragma unroll 1
    for (int first = 0; first < ranks; first += kHeadersAtOnce, header += kHeadersAtOnce * step) {
      LLPacket seen[kHeadersAtOnce];
#pragma unroll 1
      for (unsigned looks = 0;; ++looks) {
        bool here = true;
#pragma unroll
        for (int s = 0; s < kHeadersAtOnce; ++s) {
          seen[s] = {number, 0};
          if (first + s < ranks) seen[s] = load_packet_relaxed_sys(header + s * step);
          here = here && seen[s].call >= number;
        }
        if (here) break;
        if (looks >= kQuickPolls && !await(first, i)) return false;
      }
#pragma unroll
      for (int s = 0; s < kHeadersAtOnce; ++s) {
        if (first + s < ranks) use(first + s, seen[s].word);
      }
    }
    return true;
  }
  // The long wait for word `i` of some letters from `first` on. What is held across it lies in memory.
  __device__ bool await(int first, int i) const {
    const LaneView& lane = call.lane;
    const int end = min(first + kHeadersAtOnce, lane.ranks);
    for (int source = first; source < end; ++source) {
      const LLPacket* unit = lane.header(lane.rank, static_cast<int>(number & 1), source) + kHeaderCounts + i;
      if (wait_long(lane, &unit->call, nullptr, {Operation::dispatch, number, source}) != WaitResult::yes)
        return false;
    }
    return true;
  }
  // Messages from every rank to `destination`, to places.between.
  __device__ __forceinline__ bool messages_to(int destination,
                                              const BlockArray<std::int32_t>& between) const {
    const LaneView& lane = call.lane;
    if (Traits::replays(call)) {
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

inline constexpr int kMostPositions = 4;  // of a thread
static_assert(kMostPositions * kBlockThreads >= kMaxExperts);

// One of a thread's positions: what the tables say of it, then the routes of all sources to it, and of
// the sources before this rank.
struct Position {
  int expert = -1;  // -1: there is no such position
  int rank = 0;
  int here = -1;  // of this rank's experts: where its [R] of Places::here begin. First the
                  // routes of each source lie there, then its first row.
  std::int32_t all = 0, before = 0;

  __device__ __forceinline__ static Position of(const LaneView& lane, const BlockTables& tables, int p,
                                                bool exists) {
    Position position;
    if (!exists) return position;
    position.expert = tables.expert_at[p];
    position.rank = tables.rank_of[p];
    if (position.rank == lane.rank && lane.layout != Layout::rank_major)
      position.here = (p - tables.first_expert[lane.rank]) * lane.ranks;
    return position;
  }
  // `keeps`: the plan's counts, if it keeps them.
  __device__ __forceinline__ void add(const LaneView& lane, const RowOffsets& places, int source,
                                      std::int32_t routes, std::int32_t* keeps) {
    if (expert < 0) return;
    all += routes;
    if (source < lane.rank) before += routes;
    if (here >= 0) places.here[here + source] = routes;
    if (keeps != nullptr) keeps[source * lane.experts + expert] = routes;
  }
};

// Adds up the routes to the two positions of word `pair` of the counts. False: the call has ended early.
template <class Traits>
__device__ __forceinline__ bool sum_routes(const Counts<Traits>& counts, const RowOffsets& places, int pair,
                                           bool keeps, Position* position) {
  const LaneView& lane = counts.call.lane;
  if (position[0].expert < 0 && position[1].expert < 0) return true;
  std::int32_t* const kept = keeps ? counts.call.plan.counts : nullptr;
  if (!Traits::replays(counts.call)) {
    return counts.each(pair, [&](int source, std::uint64_t word) {
      position[0].add(lane, places, source, static_cast<std::int32_t>(word), kept);
      position[1].add(lane, places, source, static_cast<std::int32_t>(word >> 32), kept);
    });
  }
  for (int source = 0; source < lane.ranks; ++source) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (position[i].expert >= 0)
        position[i].add(lane, places, source, counts.planned_routes(source, position[i].expert), kept);
    }
  }
  return true;
}

// Rows of position `p`. `offset`: aligned rows of its rank's positions before it. Counts of a damaged plan
// may be so many that sums come round: what is stored stays within the capacity all the same.
__device__ __forceinline__ void place_expert(const LaneView& lane, const BlockTables& tables,
                                             const RowOffsets& places, const Position& at, int p,
                                             std::uint32_t offset, std::uint32_t aligned,
                                             ScanScratch* scratch, bool keeps) {
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
    for (int i = 0; i < 4; ++i) routes[i] = source + i < ranks ? places.here[at.here + source + i] : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (source + i < ranks)
        places.here[at.here + source + i] = static_cast<std::int32_t>(min(row, capacity));
      row += static_cast<std::uint32_t>(routes[i]);
    }
  }
}

__device__ __forceinline__ void place_ranks(const LaneView& lane, const BlockTables& tables,
                                            const RowOffsets& places, bool all, ScanScratch* scratch) {
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
template <class Traits>
__device__ __forceinline__ bool compute_row_offsets(const Counts<Traits>& counts, const RowOffsets& places,
                                                    ScanScratch* scratch, bool good, bool all, bool keeps) {
  const LaneView& lane = counts.call.lane;
  const BlockTables& tables = counts.tables;
  const bool rank_major = lane.layout == Layout::rank_major;
  const int begin = all ? 0 : tables.first_expert[lane.rank], thread = static_cast<int>(threadIdx.x),
            end = all ? lane.experts : tables.first_expert[lane.rank + 1];
  // A thread has the positions of a word of the counts, or of a few where there are more words than threads.
  const bool many = end - begin > 2 * kBlockThreads - 2;
  const int mine = many ? kMostPositions : 2, first = begin / 2 * 2 + mine * thread;
  // By the last warp but one, which has few experts, if any.
  const int destination = thread - (kBlockThreads - 64);
  if (destination >= 0 && destination < lane.ranks && (all || destination == lane.rank))
    good = counts.messages_to(destination, places.between) && good;
  // Waited for in rank_major too by the block that keeps them.
  const bool wants = !rank_major || keeps;
  Position position[kMostPositions];
  std::uint32_t aligned[kMostPositions], sum = 0;
#pragma unroll
  for (int i = 0; i < kMostPositions; i += 2) {
    if (i >= mine) continue;
#pragma unroll
    for (int of = i; of < i + 2; ++of)
      position[of] = Position::of(lane, tables, first + of, wants && first + of >= begin && first + of < end);
    good = sum_routes(counts, places, first / 2 + i / 2, keeps, position + i) && good;
  }
#pragma unroll
  for (int i = 0; i < kMostPositions; ++i) {
    aligned[i] = static_cast<std::uint32_t>(lane.by_alignment.round_up(position[i].all));
    sum += aligned[i];
  }
  std::uint32_t offset;
  if (!exclusive_scan(sum, good, scratch, &offset)) return false;
  if (!rank_major) {
    if (all) {
      // Sums over all ranks may come round; the difference of two of one rank is right all the same.
      std::uint32_t before = offset;
#pragma unroll
      for (int i = 0; i < kMostPositions; ++i) {
        if (position[i].expert >= 0) places.offset[first + i] = before;
        before += aligned[i];
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kMostPositions; ++i) {
      if (position[i].expert >= 0) {
        const std::uint32_t base = all ? places.offset[tables.first_expert[position[i].rank]] : 0;
        place_expert(lane, tables, places, position[i], first + i, offset - base, aligned[i], scratch, keeps);
      }
      offset += aligned[i];
    }
    if (lane.groups == 0 && thread == 0) places.begin[0] = 0;
  } else {
    place_ranks(lane, tables, places, all, scratch);
  }
#pragma unroll
  for (int i = 0; i < kMostPositions && keeps; ++i) {
    // One rank's calls of a lane come one after the other; an addition without an answer is not waited for.
    if (position[i].expert >= 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(lane.load + position[i].expert),
                static_cast<unsigned long long>(position[i].all));
  }
  __syncthreads();
  return true;
}

// The rank that needs the most rows of those that overflow, the lowest of equals.
static __device__ __noinline__ Overflow worst_overflow(const LaneView& lane, const BlockTables& tables,
                                                       const ScanScratch& scratch) {
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
__device__ __forceinline__ std::int32_t row_of_route(const LaneView& lane, const BlockTables& tables,
                                                     const RowOffsets& places, int position, int rank,
                                                     std::int32_t ordinal) {
  if (position < 0) return -1;
  const std::int64_t capacity = tables.capacity[rank];
  const int from = lane.layout == Layout::rank_major ? rank : position;
  const std::int64_t row = std::int64_t{places.from_me[from]} + ordinal;
  if (row >= capacity) return -1;
  const int group = position - tables.first_expert[rank];
  return static_cast<std::int32_t>(lane.layout == Layout::expert_padded ? group * capacity + row : row);
}

// Messages from a rank to a rank, `count` as a plan has it.
__device__ inline std::int32_t usable_messages(const LaneView& lane, std::int32_t count, int source,
                                               int destination) {
  const std::int64_t where = std::int64_t{source} * lane.ranks + destination;
  return usable(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
}
__device__ inline std::int64_t messages_between(const LaneView& lane, const PlanView& plan, int source,
                                                int destination) {
  return usable_messages(lane, plan.tokens_between[std::int64_t{source} * lane.ranks + destination], source,
                         destination);
}

}  // namespace ferry::cuda
