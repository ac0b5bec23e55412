// Row offsets: where the rows of each expert and source rank begin, from the counts of all ranks by prefix
// sums.
//
// Every block computes its own copy as soon as it has the call headers: sharing one would cost a grid-wide
// barrier.
#pragma once

#include "backends/cuda/dispatch/block_arrays.cuh"
#include "backends/cuda/dispatch/dispatch_traits.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/plan_entries.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kHeadersAtOnce = 4;  // headers whose words a thread loads at the same time

// The counts of all ranks: from the call headers in a dispatch from ids, otherwise from the plan, where a
// count that no routing can have is taken as 0 and recorded.
template <class Traits>
struct CountSource {
  const DispatchArguments& call;
  BlockTables tables;
  std::uint64_t number;  // call number

  // [thread] Waits for word `i` of the counts of every rank and calls use(source, word) in the order of
  // ranks. False: the call was aborted.
  template <class Use>
  __device__ __forceinline__ bool for_each_source(int i, Use use) const {
    const LaneView& lane = call.lane;
    const int ranks = lane.ranks;
    const LLPacket* header =
        memory::header(lane, lane.rank, static_cast<int>(number & 1), 0) + kHeaderCounts + i;
    const std::int64_t step =
        lane.signals.headers.source_stride / static_cast<std::int64_t>(sizeof(LLPacket));
#pragma unroll 1
    for (int first = 0; first < ranks; first += kHeadersAtOnce, header += kHeadersAtOnce * step) {
      LLPacket loaded[kHeadersAtOnce];
#pragma unroll 1
      for (unsigned looks = 0;; ++looks) {
        bool ready = true;
#pragma unroll
        for (int s = 0; s < kHeadersAtOnce; ++s) {
          loaded[s] = {number, 0};
          if (first + s < ranks) loaded[s] = load_packet_relaxed_sys(header + s * step);
          ready = ready && loaded[s].call >= number;
        }
        if (ready) break;
        if (looks >= kQuickPolls && !wait_for_headers(first, i)) return false;
      }
#pragma unroll
      for (int s = 0; s < kHeadersAtOnce; ++s) {
        if (first + s < ranks) use(first + s, loaded[s].word);
      }
    }
    return true;
  }
  // [thread] The long wait for word `i` of kHeadersAtOnce headers from `first` on. Values held across it
  // spill to local memory.
  __device__ bool wait_for_headers(int first, int i) const {
    const LaneView& lane = call.lane;
    const int end = min(first + kHeadersAtOnce, lane.ranks);
    for (int source = first; source < end; ++source) {
      const LLPacket* packet =
          memory::header(lane, lane.rank, static_cast<int>(number & 1), source) + kHeaderCounts + i;
      if (wait_long(lane, packet, nullptr, {Operation::dispatch, number, source}) != WaitResult::ready)
        return false;
    }
    return true;
  }
  // [thread] Stores the messages from every rank to `destination` in `messages`.
  __device__ __forceinline__ bool load_messages_to(int destination,
                                                   const BlockArray<std::int32_t>& messages) const {
    const LaneView& lane = call.lane;
    if (Traits::by_plan(call)) {
      for (int source = 0; source < lane.ranks; ++source) {
        const int where = source * lane.ranks + destination;
        const std::int32_t count = call.plan.tokens_between[where];
        messages[where] = valid_entry(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
      }
      return true;
    }
    const int at = lane.signals.first_messages + destination;
    return for_each_source(at / 2, [&](int source, std::uint64_t word) {
      messages[source * lane.ranks + destination] =
          static_cast<std::int32_t>(at % 2 == 0 ? word : word >> 32);
    });
  }
  // [thread] Calls use(source, messages) for the messages from every rank to `destination`, in the order of
  // ranks. False: the call was aborted.
  template <class Use>
  __device__ __forceinline__ bool for_each_message_count(int destination, Use use) const {
    const LaneView& lane = call.lane;
    if (Traits::by_plan(call)) {
      for (int source = 0; source < lane.ranks; ++source) {
        const int where = source * lane.ranks + destination;
        const std::int32_t count = call.plan.tokens_between[where];
        use(source, valid_entry(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0);
      }
      return true;
    }
    const int at = lane.signals.first_messages + destination;
    return for_each_source(at / 2, [&](int source, std::uint64_t word) {
      use(source, static_cast<std::int32_t>(at % 2 == 0 ? word : word >> 32));
    });
  }
  __device__ std::int32_t routes_in_plan(int source, int expert) const {
    const LaneView& lane = call.lane;
    const std::int64_t where = std::int64_t{source} * lane.experts + expert;
    const std::int32_t count = call.plan.counts[where];
    return valid_entry(lane, count, std::int64_t{lane.max_tokens} * lane.top_k + 1, where) ? count : 0;
  }
};

// In shared memory, beside the RowOffsets.
struct ScanScratch {
  std::uint32_t warp_sum[32];
  unsigned long long needed[kKernelRanks];  // rows that a rank needs, whatever its capacity
  unsigned long long dropped;  // routes and shared rows (rank_major: rows) past a capacity, at all ranks
  // With shared experts, of each rank: rows of each shared group, and (expert_major) of all of them, padding
  // included.
  std::int32_t shared_tokens[kKernelRanks];
  std::uint32_t shared_rows[kKernelRanks];

  // [block] Call __syncthreads() before use.
  __device__ void reset() {
    if (threadIdx.x < kKernelRanks) needed[threadIdx.x] = 0;
    if (threadIdx.x == 0) dropped = 0;
  }
};

// [block] Exclusive prefix sum of `value` over the block's threads; returns whether `valid` held for all of
// them. Uses __syncthreads() internally; call it again before the scratch is reused.
__device__ __forceinline__ bool exclusive_scan(std::uint32_t value, bool valid, ScanScratch* scratch,
                                               std::uint32_t* sum) {
  const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::uint32_t inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(~0u, inclusive, step);
    if (thread >= step) inclusive += other;
  }
  if (thread == 31) scratch->warp_sum[warp] = inclusive;
  const bool all_valid = __syncthreads_and(static_cast<int>(valid)) != 0;
  *sum = __reduce_add_sync(~0u, thread < warp ? scratch->warp_sum[thread] : 0) + inclusive - value;
  return all_valid;
}

inline constexpr int kMaxExpertsPerThread = 4;
static_assert(kMaxExpertsPerThread * kBlockThreads >= kMaxExperts);

// One of a thread's experts while row offsets are computed.
struct ExpertRoutes {
  int expert = -1;  // id; -1: the thread has no such expert
  int rank = 0;
  int first_row = -1;  // of a local expert: index of its [R] values in RowOffsets::first_row. They are first
                       // the routes of each source, then its first row.
  std::int32_t all = 0, before = 0;  // routes of all sources; of the sources before this rank

  __device__ __forceinline__ static ExpertRoutes of(const LaneView& lane, const BlockTables& tables,
                                                    int physical, bool exists) {
    ExpertRoutes routes;
    if (!exists) return routes;
    routes.expert = tables.expert_of[physical];
    routes.rank = tables.rank_of[physical];
    if (routes.rank == lane.rank && lane.layout != Layout::rank_major)
      routes.first_row = group_of(lane, tables, physical, lane.rank) * lane.ranks;
    return routes;
  }
  // Adds the routes from `source`, and stores them in the plan's counts unless `plan_counts` is null.
  __device__ __forceinline__ void add(const LaneView& lane, const RowOffsets& offsets, int source,
                                      std::int32_t routes, std::int32_t* plan_counts) {
    if (expert < 0) return;
    all += routes;
    if (source < lane.rank) before += routes;
    if (first_row >= 0) offsets.first_row[first_row + source] = routes;
    if (plan_counts != nullptr) plan_counts[source * lane.experts + expert] = routes;
  }
};

// [thread] Adds up the routes to the two experts of word `pair` of the counts. False: the call was aborted.
template <class Traits>
__device__ __forceinline__ bool sum_routes(const CountSource<Traits>& counts, const RowOffsets& offsets,
                                           int pair, bool records, ExpertRoutes* expert) {
  const LaneView& lane = counts.call.lane;
  if (expert[0].expert < 0 && expert[1].expert < 0) return true;
  std::int32_t* const plan_counts = records ? counts.call.plan.counts : nullptr;
  if (!Traits::by_plan(counts.call)) {
    return counts.for_each_source(pair, [&](int source, std::uint64_t word) {
      expert[0].add(lane, offsets, source, static_cast<std::int32_t>(word), plan_counts);
      expert[1].add(lane, offsets, source, static_cast<std::int32_t>(word >> 32), plan_counts);
    });
  }
  for (int source = 0; source < lane.ranks; ++source) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (expert[i].expert >= 0)
        expert[i].add(lane, offsets, source, counts.routes_in_plan(source, expert[i].expert), plan_counts);
    }
  }
  return true;
}

// [thread] The groups from `first` on hold no expert: they are empty, and begin where the rows end, as the
// total does.
__device__ __forceinline__ void end_groups(const LaneView& lane, const RowOffsets& offsets, int first,
                                           std::uint32_t needed, std::uint32_t capacity) {
#pragma unroll 1
  for (int group = first; group <= lane.groups; ++group) {
    offsets.group_count[group] = 0;
    offsets.group_begin[group] = static_cast<std::int32_t>(lane.layout == Layout::expert_padded
                                                               ? static_cast<std::uint32_t>(group) * capacity
                                                               : min(needed, capacity));
  }
}

// An expert's physical index, the aligned rows of its rank's experts before it, and its own.
struct AlignedRows {
  int physical;
  std::uint32_t before, own;
};

// [thread] The row offsets of one expert. The counts of a damaged plan may make sums wrap around; every
// stored offset stays within the capacity all the same.
template <class Traits>
__device__ __forceinline__ void compute_expert_offsets(const CountSource<Traits>& counts,
                                                       const RowOffsets& offsets, const ExpertRoutes& routes,
                                                       AlignedRows rows, ScanScratch* scratch, bool records) {
  const LaneView& lane = counts.call.lane;
  const BlockTables& tables = counts.tables;
  auto [physical, offset, aligned] = rows;
  const bool padded = lane.layout == Layout::expert_padded;
  const int end = tables.first_physical[routes.rank + 1],
            group = group_of(lane, tables, physical, routes.rank);
  const auto capacity = static_cast<std::uint32_t>(tables.capacity[routes.rank]);
  if (padded) {
    offset = 0;
  } else if (lane.shared_experts > 0) {
    offset += scratch->shared_rows[routes.rank];
  }
  offsets.own_first_row[physical] =
      static_cast<std::int32_t>(min(offset + static_cast<std::uint32_t>(routes.before), capacity));
  const std::uint32_t begin = min(offset, capacity), all = static_cast<std::uint32_t>(routes.all),
                      kept = min(capacity - begin, all), needed = offset + aligned;
  if (records) {
    if (all > kept) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(all - kept));
    if (!padded && physical + 1 == end) {
      scratch->needed[routes.rank] = needed;  // offsets ascend, so the last expert's end is the rank's
    } else if (padded && needed > capacity) {
      atomicMax(&scratch->needed[routes.rank], static_cast<unsigned long long>(needed));
    }
  }
  if (routes.rank != lane.rank) return;
  offsets.group_count[group] = static_cast<std::int32_t>(kept);
  offsets.group_begin[group] =
      static_cast<std::int32_t>(padded ? static_cast<std::uint32_t>(group) * capacity : begin);
  if (physical + 1 == end) end_groups(lane, offsets, group + 1, needed, capacity);
  std::uint32_t row = offset;
  const int ranks = lane.ranks;
#pragma unroll 1
  for (int source = 0; source < ranks; source += 4) {
    std::int32_t from_source[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      from_source[i] = source + i < ranks ? offsets.first_row[routes.first_row + source + i] : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (source + i < ranks)
        offsets.first_row[routes.first_row + source + i] = static_cast<std::int32_t>(min(row, capacity));
      row += static_cast<std::uint32_t>(from_source[i]);
    }
  }
}

// [block] The groups of shared experts, a thread for each rank: this rank's, and the rows that those of all
// ranks need and drop. Not inlined, so that calls without shared experts do not fetch it.
static __device__ __noinline__ void compute_shared_groups(const DispatchArguments& call, ScanScratch* scratch,
                                                          bool records) {
  const LaneView& lane = call.lane;
  const BlockTables tables = BlockTables::of(call);
  const RowOffsets offsets = RowOffsets::of(call);
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= lane.ranks || (rank != lane.rank && !records)) return;
  const bool padded = lane.layout == Layout::expert_padded,
             has_experts = tables.first_physical[rank] < tables.first_physical[rank + 1];
  const std::int64_t capacity = tables.capacity[rank], tokens = scratch->shared_tokens[rank],
                     aligned = lane.by_alignment.round_up(static_cast<std::int32_t>(tokens));
  for (int group = 0; group < lane.shared_experts; ++group) {
    const std::int64_t first = padded ? 0 : min(group * aligned, capacity),
                       kept = min(capacity - first, tokens);
    if (records && kept < tokens)
      atomicAdd(&scratch->dropped, static_cast<unsigned long long>(tokens - kept));
    if (rank != lane.rank) continue;
    offsets.group_count[group] = static_cast<std::int32_t>(kept);
    offsets.group_begin[group] = static_cast<std::int32_t>(padded ? group * capacity : first);
  }
  const std::int64_t needed = padded ? aligned : lane.shared_experts * aligned;
  // The last of a rank's experts has the rows that the rank needs; in expert_padded each expert has its own.
  if (records && (padded ? aligned > capacity : !has_experts))
    atomicMax(&scratch->needed[rank], static_cast<unsigned long long>(needed));
  if (rank == lane.rank && !has_experts)
    end_groups(lane, offsets, lane.shared_experts, static_cast<std::uint32_t>(needed),
               static_cast<std::uint32_t>(capacity));
}

// [block] The row offsets of rank_major, a thread for each rank: of all ranks, or of this one alone.
__device__ __forceinline__ void compute_rank_offsets(const LaneView& lane, const BlockTables& tables,
                                                     const RowOffsets& offsets, bool all_ranks,
                                                     ScanScratch* scratch) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= lane.ranks || (rank != lane.rank && !all_ranks)) return;
  const std::int64_t capacity = tables.capacity[rank];
  std::int64_t row = 0;
  for (int source = 0; source < lane.ranks; ++source) {
    const std::int64_t first = min(row, capacity), messages = offsets.messages[source * lane.ranks + rank];
    if (source == lane.rank) offsets.own_first_row[rank] = static_cast<std::int32_t>(first);
    row += messages;
    if (rank != lane.rank) continue;
    offsets.first_row[source] = static_cast<std::int32_t>(first);
    offsets.group_count[source] = static_cast<std::int32_t>(min(capacity - first, messages));
    offsets.group_begin[source] = static_cast<std::int32_t>(first);
  }
  if (rank == lane.rank) offsets.group_begin[lane.groups] = static_cast<std::int32_t>(min(row, capacity));
  scratch->needed[rank] = static_cast<unsigned long long>(row);
  if (row > capacity) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(row - capacity));
}

// [block] Wide kernels: the messages to this rank and, of rank_major, the row offsets of all ranks or of this
// one alone, a thread for each destination. `records`: stores all messages in the plan.
template <class Traits>
__device__ __forceinline__ bool load_messages_wide(const CountSource<Traits>& counts,
                                                   const RowOffsets& offsets, bool all_ranks, bool records,
                                                   ScanScratch* scratch) {
  const LaneView& lane = counts.call.lane;
  static_assert(!kWide || kBlockThreads >= kKernelRanks);
  const int destination = static_cast<int>(threadIdx.x);
  if (destination >= lane.ranks || (destination != lane.rank && !all_ranks)) return true;
  const bool here = destination == lane.rank;
  const std::int64_t capacity = counts.tables.capacity[destination];
  std::int64_t row = 0;
  const bool loaded = counts.for_each_message_count(destination, [&](int source, std::int32_t messages) {
    if (here) offsets.messages[source] = messages;
    if (records) counts.call.plan.tokens_between[source * lane.ranks + destination] = messages;
    if (lane.layout == Layout::rank_major) {
      const std::int64_t first = min(row, capacity);
      if (source == lane.rank) offsets.own_first_row[destination] = static_cast<std::int32_t>(first);
      if (here) {
        offsets.first_row[source] = static_cast<std::int32_t>(first);
        offsets.group_count[source] =
            static_cast<std::int32_t>(min(capacity - first, std::int64_t{messages}));
        offsets.group_begin[source] = static_cast<std::int32_t>(first);
      }
    }
    row += messages;
  });
  if (!loaded || lane.layout != Layout::rank_major) return loaded;
  if (here) offsets.group_begin[lane.groups] = static_cast<std::int32_t>(min(row, capacity));
  scratch->needed[destination] = static_cast<unsigned long long>(row);
  if (row > capacity) atomicAdd(&scratch->dropped, static_cast<unsigned long long>(row - capacity));
  return true;
}

// [block] Waits for the counts and computes the row offsets. False, in all threads alike: the call was
// aborted.
//   all_ranks  also the offsets at other ranks, which senders need; otherwise this rank's alone
//   valid      whether this thread's work has succeeded so far
//   records    this block stores the counts in the plan and adds them to the lane's load
template <class Traits>
__device__ __forceinline__ bool compute_row_offsets(const CountSource<Traits>& counts,
                                                    const RowOffsets& offsets, ScanScratch* scratch,
                                                    bool valid, bool all_ranks, bool records) {
  const LaneView& lane = counts.call.lane;
  const BlockTables& tables = counts.tables;
  const bool rank_major = lane.layout == Layout::rank_major;
  const int begin = all_ranks ? 0 : tables.first_physical[lane.rank], thread = static_cast<int>(threadIdx.x),
            end = all_ranks ? lane.experts : tables.first_physical[lane.rank + 1];
  // A thread has the two experts of one word of the counts, or four where there are more words than threads.
  const bool many = end - begin > 2 * kBlockThreads - 2;
  const int mine = many ? kMaxExpertsPerThread : 2, first = begin / 2 * 2 + mine * thread;
  // The last warp but one loads the messages: its threads have few experts, if any.
  if constexpr (kWide) {
    valid = load_messages_wide(counts, offsets, all_ranks, records, scratch) && valid;
  } else {
    const int destination = thread - (kBlockThreads - 64);
    if (destination >= 0 && destination < lane.ranks && (all_ranks || destination == lane.rank))
      valid = counts.load_messages_to(destination, offsets.messages) && valid;
  }
  // rank_major needs no counts of routes, except for the plan.
  const bool wants = !rank_major || records;
  ExpertRoutes expert[kMaxExpertsPerThread];
  std::uint32_t aligned[kMaxExpertsPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kMaxExpertsPerThread; i += 2) {
    if (i >= mine) continue;
#pragma unroll
    for (int of = i; of < i + 2; ++of)
      expert[of] =
          ExpertRoutes::of(lane, tables, first + of, wants && first + of >= begin && first + of < end);
    valid = sum_routes(counts, offsets, first / 2 + i / 2, records, expert + i) && valid;
  }
#pragma unroll
  for (int i = 0; i < kMaxExpertsPerThread; ++i) {
    aligned[i] = static_cast<std::uint32_t>(lane.by_alignment.round_up(expert[i].all));
    sum += aligned[i];
  }
  std::uint32_t offset;
  if (!exclusive_scan(sum, valid, scratch, &offset)) return false;
  if (!rank_major) {
    if (all_ranks) {
      // Sums over all ranks may wrap around; the difference of two sums within one rank is right all the
      // same.
      std::uint32_t before = offset;
#pragma unroll
      for (int i = 0; i < kMaxExpertsPerThread; ++i) {
        if (expert[i].expert >= 0) offsets.aligned_before[first + i] = before;
        before += aligned[i];
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kMaxExpertsPerThread; ++i) {
      if (expert[i].expert >= 0) {
        const std::uint32_t base =
            all_ranks ? offsets.aligned_before[tables.first_physical[expert[i].rank]] : 0;
        compute_expert_offsets(counts, offsets, expert[i], {first + i, offset - base, aligned[i]}, scratch,
                               records);
      }
      offset += aligned[i];
    }
    if (lane.shared_experts > 0) {
      compute_shared_groups(counts.call, scratch, records);
    } else if (thread == 0 && tables.first_physical[lane.rank] == tables.first_physical[lane.rank + 1]) {
      end_groups(lane, offsets, 0, 0, static_cast<std::uint32_t>(tables.capacity[lane.rank]));
    }
  } else if constexpr (!kWide) {
    compute_rank_offsets(lane, tables, offsets, all_ranks, scratch);
  }
#pragma unroll
  for (int i = 0; i < kMaxExpertsPerThread && records; ++i) {
    // No two threads add to the same expert: calls of a lane run one after the other on a rank. An atomic
    // without a result is used because the thread does not wait for it.
    if (expert[i].expert >= 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(lane.load + expert[i].expert),
                static_cast<unsigned long long>(expert[i].all));
  }
  __syncthreads();
  return true;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
