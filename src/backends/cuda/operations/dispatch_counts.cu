// Counts the routes of ids on all ranks without sending rows: one launch of one cluster. Each block counts
// its share of the tokens; then the first block exchanges call headers with the other ranks and publishes the
// sums to the host.
#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/operations/cluster_counts.cuh"
#include "backends/cuda/operations/dispatch_counts.hpp"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {
namespace {

// In shared memory.
struct CountState {
  // Counts of this block, then of the cluster, in the order of a call header's counts: routes by physical
  // index, then messages by rank.
  alignas(8) std::int32_t counts[kMaxExperts + kKernelRanks];
  std::int32_t routes[kMaxExperts];     // of all ranks to this rank's experts
  std::int32_t messages[kKernelRanks];  // from each rank to this one
  std::uint16_t physical_of[kMaxExperts];
  std::uint8_t rank_of[kMaxExperts];     // by physical index
  std::int32_t first_physical, experts;  // of this rank
  CallHeader header;
  HeaderFacts facts[kKernelRanks];
  bool agreed;
};

// [block] Counts this block's tokens.
__device__ void count_block(const CountArguments& call, CountState* state) {
  const LaneView& lane = call.lane;
  const RoutingTables tables =
      RoutingTables::at(const_cast<std::byte*>(lane.tables), lane.experts, lane.ranks);
  for (int i = threadIdx.x; i < kMaxExperts + kKernelRanks; i += kClusterThreads) state->counts[i] = 0;
  for (int i = threadIdx.x; i < lane.experts; i += kClusterThreads) {
    state->physical_of[i] = tables.physical_of[i];
    state->rank_of[i] = tables.rank_of[i];
  }
  if (threadIdx.x == 0) {
    state->first_physical = tables.first_physical[lane.rank];
    state->experts = tables.first_physical[lane.rank + 1] - tables.first_physical[lane.rank];
    state->header.terms = call.terms;
    set_epoch(*lane.epoch, &state->header);
    state->header.facts = make_header_facts(Operation::dispatch_counts, call.tokens);
  }
  __syncthreads();
  for_each_token(call.tokens, [&](std::int32_t token) {
    for (int first = 0; first < lane.ranks; first += 32) {
      std::uint32_t ranks = token < 0 ? 0
                                      : destinations_of_token(
                                            call.ids, call.wide_ids, std::int64_t{token} * lane.top_k,
                                            lane.top_k, lane.experts, first,
                                            [&](int id) {
                                              const int physical = state->physical_of[id],
                                                        rank = state->rank_of[physical];
                                              if (!keeps_route(lane.input, rank, lane.rank)) return -1;
                                              if (first == 0) atomicAdd(&state->counts[physical], 1);
                                              return rank;
                                            });
      if (lane.to_every_rank() && token >= 0) ranks = ~0u;
      for (int rank = first; rank < min(lane.ranks, first + 32); ++rank)
        count_threads((ranks >> (rank - first) & 1) != 0, &state->counts[lane.signals.first_messages + rank]);
    }
  });
}

// [block] Waits for the counts of all ranks and adds up those of this rank. Returns false in a thread whose
// wait found the call aborted.
__device__ bool receive_counts(const CountArguments& call, std::uint64_t number, CountState* state) {
  const LaneView& lane = call.lane;
  // Words that hold counts of this rank's experts, two each, and the word with its messages; of every rank.
  const int first_word = state->first_physical / 2,
            end_word = (state->first_physical + state->experts + 1) / 2, words = end_word - first_word + 1;
  bool received = true;
  for (int i = threadIdx.x; i < words * lane.ranks && received; i += kClusterThreads) {
    const int source = i % lane.ranks, nth = i / lane.ranks;
    const bool routes = nth < words - 1;
    const int at = routes ? 2 * (first_word + nth) : (lane.signals.first_messages + lane.rank) / 2 * 2;
    std::uint64_t word = 0;
    received =
        await_header_word(lane, number, Operation::dispatch_counts, source, kHeaderCounts + at / 2, &word);
    if (!received) break;
    for (int half = 0; half < 2; ++half) {
      const auto count = static_cast<std::int32_t>(word >> (32 * half));
      const int expert = at + half - state->first_physical;
      if (routes && expert >= 0 && expert < state->experts) atomicAdd(&state->routes[expert], count);
      if (!routes && at + half == lane.signals.first_messages + lane.rank) state->messages[source] = count;
    }
  }
  return received;
}

// [block] Posts this rank's counts, receives those of all ranks, and writes them for the host. Returns false
// in all threads if the call was aborted.
__device__ bool exchange_counts(const CountArguments& call, std::uint64_t number, CountState* state) {
  const LaneView& lane = call.lane;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kMaxExperts; i += kClusterThreads) state->routes[i] = 0;
  __syncthreads();
  post_header_counts(lane, number, state->counts, thread, kClusterThreads);
  if (thread < 32) {
    post_header(lane, number, state->header);
    const bool agreed = !call.posts_only && await_all_headers_wide(lane, number, state->header, true,
                                                                   [&](int rank, const HeaderFacts& theirs) {
                                                                     state->facts[rank] = theirs;
                                                                   });
    if (thread == 0) state->agreed = agreed;
  }
  __syncthreads();
  // A rank with other options, or that refuses, posts no counts.
  if (!state->agreed || __syncthreads_and(static_cast<int>(receive_counts(call, number, state))) == 0)
    return false;
  for (int rank = thread; rank < lane.ranks; rank += kClusterThreads) {
    call.host->tokens()[rank] = state->facts[rank].count;
    call.host->messages(lane.ranks)[rank] = state->messages[rank];
  }
  for (int i = thread; i < state->experts; i += kClusterThreads)
    call.host->routes(lane.ranks)[i] = state->routes[i];
  __syncthreads();
  return true;
}

__global__ void __launch_bounds__(kClusterThreads)
    dispatch_counts_kernel(const __grid_constant__ CountArguments call) {
  __shared__ CountState state;
  const LaneView& lane = call.lane;
  const std::uint64_t number = lane.state->calls[blockIdx.x] + 1;
  count_block(call, &state);
  synchronize_cluster();  // orders all blocks' counts before the reads
  if (blockIdx.x == 0) add_counts_of_cluster(state.counts, 2 * lane.signals.count_words);
  synchronize_cluster();  // no block ends while the first reads its counts
  if (blockIdx.x == 0) {
    const bool failed = is_aborted(lane, kExchangeFailed);
    const bool counted =
        __syncthreads_or(static_cast<int>(failed)) == 0 && exchange_counts(call, number, &state);
    if (threadIdx.x == 0) {
      const auto result = counted ? HostCounts::Result::counted : HostCounts::Result::aborted;
      // Release: the counts of all threads, ordered by the barrier, before the packet that announces them.
      fence_acq_rel_sys();
      store_packet_relaxed_sys(&call.host->ended, {call.call, static_cast<std::uint64_t>(result)});
    }
  }
  if (!call.posts_only) store_call_number(lane, number);
}

}  // namespace

const Kernel<CountArguments> kCountKernel{&dispatch_counts_kernel, kClusterThreads, "launch dispatch_counts"};

}  // namespace ferry::cuda
