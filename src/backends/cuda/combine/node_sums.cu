#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/combine/node_sums.hpp"

#include "backends/cuda/combine/merge_rows.cuh"
#include "backends/cuda/combine/row_flags.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {
namespace {

constexpr int kMostBlocks = 1024;
constexpr int kPositions = 32;  // positions in a token's list of ranks, one for each thread of a warp

// The rows of one token, in shared memory.
struct TokenRowsByNode {
  int nodes;                           // 0: the rows stay as they are
  int first[kPositions + 1];           // of a node, among the rows below
  std::byte* row[kPositions];          // by node, then by rank
  std::int32_t rank[kPositions];       // rank of each row
  int index_of_node[kMaxDeviceRanks];  // by node number; -1: the token has no rank there
};

// [warp] Sorts the rows of token `token`. Thread p stands for position p of its list of ranks.
__device__ void sort_by_node(const AddOnNodesArguments& call, std::int64_t token, std::uint64_t number,
                             TokenRowsByNode* rows) {
  const LaneView& lane = call.lane;
  const int position = static_cast<int>(threadIdx.x);
  const std::int64_t index = token * lane.most_ranks + position;
  std::int32_t rank = position < lane.most_ranks ? call.plan.token_ranks[index] : -1;
  const std::uint32_t ends = __ballot_sync(~0u, rank == -1);
  if (ends != 0 && position > __ffs(static_cast<int>(ends)) - 1) rank = -1;
  const bool possible = rank >= 0 && rank < lane.ranks;
  const int node = possible ? call.node_of[rank] : kMaxDeviceRanks;
  const std::uint32_t same = __match_any_sync(~0u, node);
  const bool leads = possible && (same & ((1u << position) - 1)) == 0;
  // A row that a relay has added carries the label of its first row.
  const bool has_row = leads || (possible && (!call.relays_add || node == call.node_of[lane.rank]));
  LLPacket arrived{};
  if (has_row) arrived = call.arrived[index];
  const bool usable = __all_sync(~0u, (rank == -1 || possible) && (!has_row || arrived.call == number));
  const std::uint32_t present = usable ? __ballot_sync(~0u, has_row) : 0, leaders = __ballot_sync(~0u, leads);
  const int key = node * kPositions + position;
  int before = 0, nodes_before = 0, nodes = 0;
#pragma unroll 1
  for (std::uint32_t left = present; left != 0; left &= left - 1) {
    const int other = __ffs(static_cast<int>(left)) - 1;
    const int other_key = __shfl_sync(~0u, key, other);
    const bool other_leads = (leaders >> other & 1) != 0;
    before += other_key < key;
    nodes_before += other_leads && other_key / kPositions < node;
    nodes += other_leads;
  }
  for (int other = position; other < kMaxDeviceRanks; other += 32) rows->index_of_node[other] = -1;
  __syncwarp();
  if ((present >> position & 1) != 0) {
    rows->row[before] = reinterpret_cast<std::byte*>(arrived.word);
    rows->rank[before] = rank;
    if (leads) {
      rows->first[nodes_before] = before;
      rows->index_of_node[node] = nodes_before;
    }
  }
  if (position == 0) {
    rows->nodes = nodes;
    rows->first[nodes] = __popc(static_cast<int>(present));
  }
}

// One block for each token.
__global__ void __launch_bounds__(kMergeThreads)
    add_on_nodes_kernel(const __grid_constant__ AddOnNodesArguments call) {
  __shared__ TokenRowsByNode rows;
  const LaneView& lane = call.lane;
  if (check_plan(lane, *call.plan.header, -1) != PlanFault::none) return;
  const int thread = static_cast<int>(threadIdx.x);
  // Every block reads it before the call is counted, which the reducers do later on the stream.
  const std::uint64_t number = lane.state->calls[0] + 1;
  for (std::int64_t token = blockIdx.x; token < call.plan.header->tokens; token += gridDim.x) {
    if (thread < 32) sort_by_node(call, token, number, &rows);
    __syncthreads();
    for (int node = 0; node < rows.nodes; ++node) {
      std::byte* const* const row = rows.row + rows.first[node];
      const int count = rows.first[node + 1] - rows.first[node];
      if (call.has_values) join_tails(call.row.tail_offset, lane.top_k, row, count, row[0]);
      if (call.has_rows) add_values(call.combine_type, lane.hidden, row, count, row[0]);
    }
    if (thread < lane.top_k) {
      const std::int64_t route = token * lane.top_k + thread;
      const std::int32_t rank = call.plan.route_rank[route];
      const int node = rank >= 0 && rank < lane.ranks ? rows.index_of_node[call.node_of[rank]] : -1;
      call.route_rank[route] = node >= 0 ? rows.rank[rows.first[node]] : rank;
    }
    if (thread < lane.most_ranks) {
      const std::int64_t index = token * lane.most_ranks + thread;
      std::int32_t rank = rows.nodes > 0 ? -1 : call.plan.token_ranks[index];
      if (thread < rows.nodes) {
        const int first = rows.first[thread];
        rank = rows.rank[first];
        call.arrived[index] = {number, reinterpret_cast<std::uint64_t>(rows.row[first])};
        set_row_flags(lane, index, number);
      }
      call.token_ranks[index] = rank;
    }
    __syncthreads();
  }
}

}  // namespace

void prepare_node_sums() {
  load_kernels(&add_on_nodes_kernel);
}

void launch_add_on_nodes(const AddOnNodesArguments& arguments, cudaStream_t stream) {
  const int blocks = arguments.lane.max_tokens < kMostBlocks ? arguments.lane.max_tokens : kMostBlocks;
  launch(&add_on_nodes_kernel, arguments, kMergeThreads, blocks, stream, "add the rows of nodes");
}

}  // namespace ferry::cuda
