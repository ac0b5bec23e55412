// dispatch_layout() on GPUs: one launch of one cluster. Each block counts the tokens that fall to it in its
// own shared memory; the blocks then add up each other's counts, so that nothing needs to be cleared first.
#include <algorithm>
#include <optional>

#include "backends/cuda/memory/device_access.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "base/text.hpp"
#include "exchange/dispatch_layout.hpp"
#include "ferry/error.hpp"
#include "plan/slot.hpp"

namespace ferry {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMostClusterBlocks = 8;  // of a cluster that every GPU supports

struct LayoutArguments {
  const void* ids;
  bool wide_ids;  // int64
  std::int32_t tokens, top_k, experts, ranks, nodes, ranks_per_node;
  DispatchLayout result;
  std::uint8_t rank_of[kMaxExperts];
};

// [thread] The destinations of a token, one bit each. Adds its routes to `routes` [E], in shared memory.
template <class Id>
__device__ std::uint32_t count_token(const LayoutArguments& call, const std::uint8_t* rank_of,
                                     std::int32_t token, std::int32_t* routes) {
  const Id* const ids = static_cast<const Id*>(call.ids) + std::int64_t{token} * call.top_k;
  std::uint32_t ranks = 0;
  for (int slot = 0; slot < call.top_k; ++slot) {
    const Id id = ids[slot];
    if (classify_id(id, call.experts) != IdKind::expert) continue;
    atomicAdd(&routes[id], 1);
    ranks |= 1u << rank_of[id];
  }
  return ranks;
}

// [warp] Adds the threads that have any of `bits` in `mine` to `count`, in shared memory.
__device__ void count_threads(std::uint32_t mine, std::uint32_t bits, std::int32_t* count) {
  const int threads = __popc(static_cast<int>(__ballot_sync(~0u, (mine & bits) != 0)));
  if (threadIdx.x % 32 == 0 && threads > 0) atomicAdd(count, threads);
}

// [block] A barrier of all blocks of the cluster: arrives with release, waits with acquire.
__device__ void synchronize_cluster() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

__global__ void __launch_bounds__(kThreads)
    dispatch_layout_kernel(const __grid_constant__ LayoutArguments call) {
  // Counts of this block: routes to each expert, then tokens to each rank, then to each node.
  __shared__ std::int32_t counts[kMaxExperts + 2 * kMaxRanks];
  __shared__ std::uint8_t rank_of[kMaxExperts];
  const int thread = static_cast<int>(threadIdx.x), of_ranks = call.experts, of_nodes = of_ranks + call.ranks,
            end = of_nodes + call.nodes;
  for (int i = thread; i < end; i += kThreads) counts[i] = 0;
  for (int i = thread; i < call.experts; i += kThreads) rank_of[i] = call.rank_of[i];
  __syncthreads();

  const auto step = static_cast<std::int32_t>(gridDim.x) * kThreads;
  // Whole warps go round together, because they vote.
  for (std::int32_t warp_token = static_cast<std::int32_t>(blockIdx.x) * kThreads + thread / 32 * 32;
       warp_token < call.tokens; warp_token += step) {
    const std::int32_t token = warp_token + thread % 32;
    std::uint32_t ranks = 0;
    if (token < call.tokens) {
      ranks = call.wide_ids ? count_token<std::int64_t>(call, rank_of, token, counts)
                            : count_token<std::int32_t>(call, rank_of, token, counts);
      bool* const in_rank = call.result.token_in_rank + std::int64_t{token} * call.ranks;
      for (int rank = 0; rank < call.ranks; ++rank) in_rank[rank] = (ranks >> rank & 1) != 0;
    }
    for (int rank = 0; rank < call.ranks; ++rank) count_threads(ranks, 1u << rank, &counts[of_ranks + rank]);
    const std::uint32_t first_node = ~0u >> (32 - call.ranks_per_node);
    for (int node = 0; node < call.nodes; ++node)
      count_threads(ranks, first_node << node * call.ranks_per_node, &counts[of_nodes + node]);
  }

  synchronize_cluster();  // orders all blocks' counts before the reads
  for (int i = static_cast<int>(blockIdx.x) * kThreads + thread; i < end; i += step) {
    std::int32_t sum = 0;
    for (unsigned block = 0; block < gridDim.x; ++block)
      sum += static_cast<const std::int32_t*>(__cluster_map_shared_rank(counts, block))[i];
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

void check_device(const DispatchLayoutCall& call) {
  if (call.placement.ranks() > kMaxRanks || call.placement.experts() > kMaxExperts) {
    throw UnsupportedError(str("the cuda backend supports up to ", kMaxRanks, " ranks and ", kMaxExperts,
                               " experts, got ", call.placement.ranks(), " and ", call.placement.experts()));
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
}  // namespace cuda

void dispatch_layout_on_device(const DispatchLayoutCall& call, Stream stream) {
  using namespace cuda;
  check_device(call);
  LayoutArguments arguments{.ids = call.ids.data,
                            .wide_ids = call.ids.type == IdType::int64,
                            .tokens = static_cast<std::int32_t>(call.tokens),
                            .top_k = call.top_k,
                            .experts = call.placement.experts(),
                            .ranks = call.placement.ranks(),
                            .nodes = call.nodes,
                            .ranks_per_node = call.ranks_per_node,
                            .result = call.result,
                            .rank_of = {}};
  for (int expert = 0; expert < call.placement.experts(); ++expert)
    arguments.rank_of[expert] = static_cast<std::uint8_t>(call.placement.location(expert).rank);
  const std::int64_t blocks = (call.tokens + kThreads - 1) / kThreads;
  launch(
      reinterpret_cast<const void*>(&dispatch_layout_kernel), &arguments, kThreads, 0,
      {.blocks = static_cast<int>(std::clamp<std::int64_t>(blocks, 1, kMostClusterBlocks)), .cluster = true},
      handle_of(stream), "launching dispatch_layout");
}

}  // namespace ferry
