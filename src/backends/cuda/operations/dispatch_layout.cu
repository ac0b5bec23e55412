// dispatch_layout() on GPUs: one launch of one cluster, whose blocks count together.
#include <optional>

#include "backends/cuda/memory/pointer_check.hpp"
#include "backends/cuda/operations/cluster_counts.cuh"
#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace cuda {
namespace {

struct LayoutArguments {
  const void* ids;
  bool wide_ids;  // int64
  std::int32_t tokens, top_k, experts, ranks, nodes;
  DispatchLayout result;
  std::uint32_t
      ranks_of[kNarrowRanks];  // up to kNarrowRanks ranks: of each node, a bit for each of its ranks
  std::uint8_t node_of[kMaxDeviceRanks];  // more: of each rank
  std::uint8_t rank_of[kMaxExperts];
};

__global__ void __launch_bounds__(kClusterThreads)
    dispatch_layout_kernel(const __grid_constant__ LayoutArguments call) {
  // Counts of this block: routes to each expert, then tokens to each rank, then to each node.
  __shared__ std::int32_t counts[kMaxExperts + 2 * kMaxDeviceRanks];
  __shared__ std::uint8_t rank_of[kMaxExperts];
  const int thread = static_cast<int>(threadIdx.x), of_ranks = call.experts, of_nodes = of_ranks + call.ranks,
            end = of_nodes + call.nodes;
  for (int i = thread; i < end; i += kClusterThreads) counts[i] = 0;
  for (int i = thread; i < call.experts; i += kClusterThreads) rank_of[i] = call.rank_of[i];
  __syncthreads();

  const bool narrow = call.ranks <= kNarrowRanks;
  for_each_token(narrow ? 0 : call.tokens, [&](std::int32_t token) {
    const auto count_bits = [&](int numbers, int begin, auto number_of) {
      for (int first = 0; first < numbers; first += 32) {
        const std::uint32_t bits =
            token < 0 ? 0
                      : destinations_of_token(call.ids, call.wide_ids, std::int64_t{token} * call.top_k,
                                              call.top_k, call.experts, first, number_of);
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
      const std::int64_t route = std::int64_t{token} * call.top_k + slot,
                         id = call.wide_ids ? static_cast<const std::int64_t*>(call.ids)[route]
                                            : static_cast<const std::int32_t*>(call.ids)[route];
      if (classify_id(id, call.experts) == IdKind::expert) atomicAdd(&counts[id], 1);
    }
  });
  for_each_token(narrow ? call.tokens : 0, [&](std::int32_t token) {
    std::uint32_t ranks = 0;
    if (token >= 0) {
      ranks = destinations_of_token(call.ids, call.wide_ids, std::int64_t{token} * call.top_k, call.top_k,
                                    call.experts, 0, [&](int id) {
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

const Kernel<LayoutArguments> kDispatchLayoutKernel{&dispatch_layout_kernel, kClusterThreads,
                                                    "launch dispatch_layout"};

void check_device(const DispatchLayoutCall& call) {
  if (call.placement.ranks() > kMaxDeviceRanks || call.placement.experts() > kMaxExperts) {
    throw UnsupportedError(str("the cuda backend supports up to ", kMaxDeviceRanks, " ranks and ",
                               kMaxExperts, " experts, got ", call.placement.ranks(), " and ",
                               call.placement.experts()));
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
                            .nodes = call.nodes(),
                            .result = call.result,
                            .ranks_of = {},
                            .node_of = {},
                            .rank_of = {}};
  for (int expert = 0; expert < call.placement.experts(); ++expert)
    arguments.rank_of[expert] = static_cast<std::uint8_t>(call.placement.location(expert).rank);
  for (int rank = 0; call.topology != nullptr && rank < call.placement.ranks(); ++rank) {
    const int node = call.topology->node_of(rank);
    arguments.node_of[rank] = static_cast<std::uint8_t>(node);
    if (call.placement.ranks() <= kNarrowRanks) arguments.ranks_of[node] |= 1u << rank;
  }
  kDispatchLayoutKernel(arguments, cluster_shape(call.tokens), stream);
}

}  // namespace ferry
