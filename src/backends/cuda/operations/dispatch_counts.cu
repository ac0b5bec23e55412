// dispatch_counts and dispatch_layout: each counts the routes of many tokens in one launch of one cluster. A
// block counts its share of the tokens in its own shared memory, and reads the other blocks' counts there, so
// that no device memory has to be cleared.
#define FERRY_WIDE_KERNELS  // for groups of any size
#include <optional>

#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/memory/pointer_check.hpp"
#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "ferry/error.hpp"
#include "plan/replica_choice.hpp"

namespace ferry {
namespace cuda {
namespace {

// [block] A barrier of all blocks of the cluster: arrives with release, waits with acquire.
__device__ void synchronize_cluster() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// [block] Calls use(token) for each token that falls to this thread of the cluster. Whole warps call it
// together; `token` is -1 in threads without one.
template <class Use>
__device__ __forceinline__ void for_each_token(std::int32_t tokens, Use use) {
  const auto step = static_cast<std::int32_t>(gridDim.x) * kClusterThreads;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t first = static_cast<std::int32_t>(blockIdx.x) * kClusterThreads + thread / 32 * 32;
       first < tokens; first += step) {
    const std::int32_t token = first + thread % 32;
    use(token < tokens ? token : -1);
  }
}

// Ids of the tokens whose routes are counted.
struct CountedIds {
  const void* ids;
  bool wide;  // int64
  std::int32_t top_k, experts;

  __device__ __forceinline__ std::int64_t at(std::int64_t route) const {
    return wide ? static_cast<const std::int64_t*>(ids)[route] : static_cast<const std::int32_t*>(ids)[route];
  }
};

// The replicas that the routes of the ids take, which are counted in place of experts.
struct CountedReplicas {
  CountedIds ids;              // of experts
  const std::uint16_t* first;  // [E + 1] number of an expert's first replica
  std::int32_t source, top_k, experts;

  __device__ __forceinline__ std::int64_t at(std::int64_t route) const {
    const std::int64_t id = ids.at(route);
    if (classify_id(id, ids.experts) != IdKind::expert) return -1;
    const auto at = static_cast<std::int32_t>(route);
    const int token = at / top_k;
    return chosen_replica(first, static_cast<std::int32_t>(id),
                          {.token = token, .source = source, .slot = at - token * top_k});
  }
};

// [thread] The destinations of a token among the 32 ranks from `first_rank` on, one bit each. count(id)
// counts a route and returns the expert's rank, or -1 for a route that this rank does not plan.
template <class Ids, class Count>
__device__ __forceinline__ std::uint32_t destinations_of_token(const Ids& ids, std::int32_t token,
                                                               int first_rank, Count count) {
  std::uint32_t ranks = 0;
  const std::int64_t first = std::int64_t{token} * ids.top_k;
  for (int slot = 0; slot < ids.top_k; ++slot) {
    const std::int64_t id = ids.at(first + slot);
    if (classify_id(id, ids.experts) != IdKind::expert) continue;
    const auto bit = static_cast<unsigned>(count(static_cast<int>(id)) - first_rank);
    if (bit < 32) ranks |= 1u << bit;
  }
  return ranks;
}

// [warp] Adds the number of threads that `count` to the counter in shared memory.
__device__ __forceinline__ void count_threads(bool counted, std::int32_t* counter) {
  const int threads = __popc(static_cast<int>(__ballot_sync(~0u, counted)));
  if (threadIdx.x % 32 == 0 && threads > 0) atomicAdd(counter, threads);
}

// The counter at the same place in the shared memory of block `block` of the cluster.
__device__ __forceinline__ const std::int32_t* counter_of(const std::int32_t* counter, unsigned block) {
  return static_cast<const std::int32_t*>(__cluster_map_shared_rank(counter, block));
}

// [block] Adds the other blocks' counts [count] to those of this one, the first.
__device__ __forceinline__ void add_counts_of_cluster(std::int32_t* counts, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kClusterThreads) {
    for (unsigned block = 1; block < gridDim.x; ++block) counts[i] += *counter_of(counts + i, block);
  }
}

// --- dispatch_counts: the first block exchanges call headers and publishes the sums ------------------------

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
  const CountedIds ids{call.ids, call.wide_ids, lane.top_k, lane.experts};
  for_each_token(call.tokens, [&](std::int32_t token) {
    for (int first = 0; first < lane.ranks; first += 32) {
      std::uint32_t ranks = token < 0 ? 0
                                      : destinations_of_token(
                                            ids, token, first,
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

// --- dispatch_layout ---------------------------------------------------------------------------------------

struct LayoutArguments {
  const void* ids;
  bool wide_ids;                                      // int64
  std::int32_t tokens, top_k, experts, ranks, nodes;  // with replicas `experts` is P
  DispatchLayout result;
  std::uint32_t
      ranks_of[kNarrowRanks];  // up to kNarrowRanks ranks: of each node, a bit for each of its ranks
  std::uint8_t node_of[kMaxDeviceRanks];  // more: of each rank
  std::uint8_t rank_of[kMaxExperts];
};

struct ReplicaLayoutArguments : LayoutArguments {
  std::int32_t ids_of;  // E
  std::int32_t source;
  std::uint16_t first[kMaxExperts + 1];  // number of an expert's first replica
};

__device__ __forceinline__ CountedIds counted_ids(const LayoutArguments& call) {
  return {call.ids, call.wide_ids, call.top_k, call.experts};
}
__device__ __forceinline__ CountedReplicas counted_ids(const ReplicaLayoutArguments& call) {
  return {
      {call.ids, call.wide_ids, call.top_k, call.ids_of}, call.first, call.source, call.top_k, call.experts};
}

template <class Arguments>
__global__ void __launch_bounds__(kClusterThreads)
    dispatch_layout_kernel(const __grid_constant__ Arguments call) {
  // Counts of this block: routes to each expert, then tokens to each rank, then to each node.
  __shared__ std::int32_t counts[kMaxExperts + 2 * kMaxDeviceRanks];
  __shared__ std::uint8_t rank_of[kMaxExperts];
  const int thread = static_cast<int>(threadIdx.x), of_ranks = call.experts, of_nodes = of_ranks + call.ranks,
            end = of_nodes + call.nodes;
  for (int i = thread; i < end; i += kClusterThreads) counts[i] = 0;
  for (int i = thread; i < call.experts; i += kClusterThreads) rank_of[i] = call.rank_of[i];
  __syncthreads();

  const auto ids = counted_ids(call);
  const bool narrow = call.ranks <= kNarrowRanks;
  for_each_token(narrow ? 0 : call.tokens, [&](std::int32_t token) {
    const auto count_bits = [&](int numbers, int begin, auto number_of) {
      for (int first = 0; first < numbers; first += 32) {
        const std::uint32_t bits = token < 0 ? 0 : destinations_of_token(ids, token, first, number_of);
        for (int i = first; i < min(numbers, first + 32); ++i) {
          const bool is_one = (bits >> (i - first) & 1) != 0;
          count_threads(is_one, &counts[begin + i]);
          if (begin == of_ranks && token >= 0 && call.result.token_in_rank != nullptr)
            call.result.token_in_rank[std::int64_t{token} * call.ranks + i] = is_one;
        }
      }
    };
    count_bits(call.ranks, of_ranks, [&](int id) { return int{rank_of[id]}; });
    count_bits(call.nodes, of_nodes, [&](int id) { return int{call.node_of[rank_of[id]]}; });
    for (int slot = 0; token >= 0 && slot < call.top_k; ++slot) {
      const std::int64_t id = ids.at(std::int64_t{token} * call.top_k + slot);
      if (classify_id(id, call.experts) == IdKind::expert) atomicAdd(&counts[id], 1);
    }
  });
  for_each_token(narrow ? call.tokens : 0, [&](std::int32_t token) {
    std::uint32_t ranks = 0;
    if (token >= 0) {
      ranks = destinations_of_token(ids, token, 0, [&](int id) {
        atomicAdd(&counts[id], 1);
        return int{rank_of[id]};
      });
      bool* const in_rank = call.result.token_in_rank + std::int64_t{token} * call.ranks;
      for (int rank = 0; rank < call.ranks && call.result.token_in_rank != nullptr; ++rank)
        in_rank[rank] = (ranks >> rank & 1) != 0;
    }
    for (int rank = 0; rank < call.ranks; ++rank)
      count_threads((ranks >> rank & 1) != 0, &counts[of_ranks + rank]);
    for (int node = 0; node < call.nodes; ++node)
      count_threads((ranks & call.ranks_of[node]) != 0, &counts[of_nodes + node]);
  });

  synchronize_cluster();  // orders all blocks' counts before the reads
  const int step = static_cast<int>(gridDim.x) * kClusterThreads;
  for (int i = static_cast<int>(blockIdx.x) * kClusterThreads + thread; i < end; i += step) {
    std::int32_t sum = 0;
    for (unsigned block = 0; block < gridDim.x; ++block) sum += *counter_of(counts + i, block);
    if (i < of_ranks) {
      call.result.routes_per_expert[i] = sum;
    } else if (i < of_nodes) {
      call.result.tokens_per_rank[i - of_ranks] = sum;
    } else {
      call.result.tokens_per_node[i - of_nodes] = sum;
    }
  }
  synchronize_cluster();  // no block ends while another reads its counts
}

const Kernel<LayoutArguments> kDispatchLayoutKernel{&dispatch_layout_kernel<LayoutArguments>, kClusterThreads,
                                                    "launch dispatch_layout"};
const Kernel<ReplicaLayoutArguments> kReplicaLayoutKernel{&dispatch_layout_kernel<ReplicaLayoutArguments>,
                                                          kClusterThreads, "launch dispatch_layout"};

void check_device(const DispatchLayoutCall& call) {
  if (call.placement.ranks() > kMaxDeviceRanks || call.placement.total_replicas() > kMaxExperts) {
    throw UnsupportedError(str("the cuda backend supports up to ", kMaxDeviceRanks, " ranks and ",
                               kMaxExperts, " experts, got ", call.placement.ranks(), " and ",
                               call.placement.total_replicas()));
  }
  int device = 0;
  check(cudaGetDevice(&device), "find the current device");
  thread_local std::optional<PointerCheck> check_of_device;
  thread_local int checked = -1;
  if (checked != device) {
    check_of_device.emplace("", device,
                            [device](const void* address) { return find_memory(address, device); });
    checked = device;
  }
  constexpr std::int64_t kWord = sizeof(std::int32_t);
  CallPointers pointers;
  if (call.tokens > 0) {
    pointers.add("ids", call.ids.data, bytes_of(call.ids.type));
    pointers.add("token_in_rank", call.result.token_in_rank, 1);
  }
  pointers.add("tokens_per_rank", call.result.tokens_per_rank, kWord);
  pointers.add("routes_per_expert", call.result.routes_per_expert, kWord);
  pointers.add("tokens_per_node", call.result.tokens_per_node, kWord);
  check_of_device->require_usable("dispatch_layout", pointers);
}

}  // namespace

const Kernel<CountArguments> kCountKernel{&dispatch_counts_kernel, kClusterThreads, "launch dispatch_counts"};

}  // namespace cuda

void dispatch_layout_on_device(const DispatchLayoutCall& call, Stream stream) {
  using namespace cuda;
  check_device(call);
  const Placement& placement = call.placement;
  ReplicaLayoutArguments arguments{};
  arguments.ids = call.ids.data;
  arguments.wide_ids = call.ids.type == IdType::int64;
  arguments.tokens = static_cast<std::int32_t>(call.tokens);
  arguments.top_k = call.top_k;
  arguments.experts = placement.total_replicas();
  arguments.ranks = placement.ranks();
  arguments.nodes = call.nodes();
  arguments.result = call.result;
  for (int replica = 0; replica < placement.total_replicas(); ++replica) {
    const ExpertLocation& location = placement.locations()[static_cast<std::size_t>(replica)];
    arguments.rank_of[replica] = static_cast<std::uint8_t>(location.rank);
  }
  for (int rank = 0; call.topology != nullptr && rank < placement.ranks(); ++rank) {
    const int node = call.topology->node_of(rank);
    arguments.node_of[rank] = static_cast<std::uint8_t>(node);
    if (placement.ranks() <= kNarrowRanks) arguments.ranks_of[node] |= 1u << rank;
  }
  const LaunchShape shape = cluster_shape(call.tokens);
  if (!placement.has_replicas()) return kDispatchLayoutKernel(arguments, shape, stream);
  arguments.ids_of = placement.experts();
  arguments.source = call.source;
  for (int expert = 0; expert < placement.experts(); ++expert)
    arguments.first[expert + 1] =
        static_cast<std::uint16_t>(arguments.first[expert] + placement.replicas_of(expert).size());
  kReplicaLayoutKernel(arguments, shape, stream);
}

}  // namespace ferry
