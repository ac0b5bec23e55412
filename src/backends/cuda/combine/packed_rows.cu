#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/combine/packed_rows.hpp"

#include <algorithm>

#include "backends/cuda/combine/packed_rows.cuh"
#include "backends/cuda/device/block_sums.cuh"
#include "backends/cuda/protocol/plan_entries.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {
namespace {

constexpr int kPlaceThreads = 1024, kPlaceMessages = 4;  // messages of a thread in a round
constexpr int kFindThreads = 256, kFindBlocks = 32;      // blocks for each source

// [thread] Rows that a message returns.
__device__ std::int32_t rows_of_message(const PlaceRowsArguments& call, std::int64_t message) {
  if (call.one_row) return 1;
  const LaneView& lane = call.lane;
  const std::int32_t* row = call.plan.received_rows_of_message + message * lane.top_k;
  std::int32_t rows = 0;
  for (int slot = 0; slot < lane.top_k; ++slot) rows += row[slot] >= 0 && row[slot] < call.plan.header->total;
  return lane.layout == Layout::rank_major ? min(rows, 1) : rows;
}

// One block for each source rank.
__global__ void __launch_bounds__(kPlaceThreads)
    place_rows_kernel(const __grid_constant__ PlaceRowsArguments call) {
  __shared__ BlockSums<kPlaceThreads> sums;
  const LaneView& lane = call.lane;
  const int source = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const bool usable = check_plan(lane, *call.plan.header, -1) == PlanFault::none;
  const std::int32_t counted = call.plan.tokens_between[std::int64_t{source} * lane.ranks + lane.rank];
  const std::int32_t messages = usable && counted >= 0 && counted <= lane.max_tokens ? counted : 0;
  std::int32_t before = 0;
  // Each thread adds neighbouring messages, so that one prefix sum over the block covers all of them.
  for (std::int32_t first = 0; first < messages; first += kPlaceThreads * kPlaceMessages) {
    const std::int32_t begin = first + thread * kPlaceMessages;
    const std::int64_t message = std::int64_t{source} * lane.max_tokens + begin;
    std::int32_t rows[kPlaceMessages], mine = 0, all = 0;
    for (int i = 0; i < kPlaceMessages; ++i) {
      rows[i] = begin + i < messages ? rows_of_message(call, message + i) : 0;
      mine += rows[i];
    }
    std::int32_t place = before + sums.before(mine, &all);
    for (int i = 0; i < kPlaceMessages && begin + i < messages; ++i) {
      call.first_row[message + i] = place;
      place += rows[i];
    }
    before += all;
  }
  if (thread == 0) call.rows[source] = before;
}

__global__ void __launch_bounds__(kFindThreads)
    find_rows_kernel(const __grid_constant__ FindRowsArguments call) {
  const int source = static_cast<int>(blockIdx.x) / kFindBlocks,
            block = static_cast<int>(blockIdx.x) % kFindBlocks;
  const ArrivedRows from = call.from[source];
  // Every block reads it before the call is counted, which the reducers do later on the stream.
  const std::uint64_t number = call.lane.state->calls[0] + 1;
  for (std::int64_t i = block * kFindThreads + static_cast<int>(threadIdx.x); i < from.count;
       i += kFindBlocks * kFindThreads) {
    const std::byte* row = from.rows + i * call.row_bytes;
    const std::uint64_t label = *reinterpret_cast<const std::uint64_t*>(row + call.label_offset);
    const auto index = static_cast<std::int32_t>(label);
    if (index < 0 || index >= call.most || label != packed_label(number, index)) continue;
    call.arrived[index] = {number, reinterpret_cast<std::uint64_t>(row)};
    set_row_flags(call.lane, index, number);
  }
}

// --- sums by node, after the transfer ----------------------------------------------------------------------

constexpr int kMostNodeBlocks = 1024;
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
      add_values(call.combine_type, lane.hidden, row, count, row[0]);
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

// --- sums of a relay, before it sends ----------------------------------------------------------------------

constexpr int kScanThreads = 1024, kMostSumBlocks = 1024, kBlocksOfRank = 32;

__device__ const std::byte* row_of(const RelaySumsArguments& call, int rank, std::int32_t number) {
  return call.from[rank].rows + number * std::int64_t{call.row_bytes};
}
__device__ std::uint64_t label_of(const RelaySumsArguments& call, const std::byte* row) {
  return *reinterpret_cast<const std::uint64_t*>(row + call.label_offset);
}

// Records for each token the number of every rank's row, from 1.
__global__ void __launch_bounds__(kMergeThreads)
    note_rows_kernel(const __grid_constant__ RelaySumsArguments call) {
  const LaneView& lane = call.lane;
  const int rank = static_cast<int>(blockIdx.x) / kBlocksOfRank,
            block = static_cast<int>(blockIdx.x) % kBlocksOfRank;
  const std::uint64_t number = lane.state->calls[0] + 1;
  const auto count = static_cast<std::int32_t>(call.from[rank].count);
  for (std::int32_t i = block * kMergeThreads + static_cast<int>(threadIdx.x); i < count;
       i += kBlocksOfRank * kMergeThreads) {
    const std::uint64_t label = label_of(call, row_of(call, rank, i));
    const auto index = static_cast<std::int32_t>(label), token = index / lane.most_ranks;
    if (index < 0 || token >= lane.max_tokens || label != packed_label(number, index)) continue;
    call.row_of[std::int64_t{token} * call.held + rank] = i + 1;
  }
}

// A single block.
__global__ void __launch_bounds__(kScanThreads)
    place_sums_kernel(const __grid_constant__ RelaySumsArguments call) {
  __shared__ BlockSums<kScanThreads> sums;
  std::int32_t before = 0;
  for (std::int32_t first = 0; first < call.lane.max_tokens; first += kScanThreads) {
    const std::int32_t token = first + static_cast<int>(threadIdx.x);
    std::int32_t has_row = 0;
    for (int rank = 0; token < call.lane.max_tokens && rank < call.held; ++rank)
      has_row |= call.row_of[std::int64_t{token} * call.held + rank] != 0 ? 1 : 0;
    std::int32_t all = 0;
    const std::int32_t place = before + sums.before(has_row, &all);
    if (token < call.lane.max_tokens) call.place_of[token] = place;
    before += all;
  }
  if (threadIdx.x == 0) *call.count = before;
}

// One block for each token.
__global__ void __launch_bounds__(kMergeThreads)
    add_rows_kernel(const __grid_constant__ RelaySumsArguments call) {
  __shared__ std::byte* row[kMaxDeviceRanks];
  for (std::int32_t token = static_cast<std::int32_t>(blockIdx.x); token < call.lane.max_tokens;
       token += static_cast<std::int32_t>(gridDim.x)) {
    int count = 0;
    for (int rank = 0; rank < call.held; ++rank) {
      const std::int32_t number = call.row_of[std::int64_t{token} * call.held + rank];
      if (number == 0) continue;
      if (threadIdx.x == 0) row[count] = const_cast<std::byte*>(row_of(call, rank, number - 1));
      ++count;
    }
    if (count == 0) continue;
    __syncthreads();
    std::byte* const to = call.out + call.place_of[token] * std::int64_t{call.row_bytes};
    add_values(call.combine_type, call.lane.hidden, row, count, to);
    join_tails(call.row.tail_offset, call.lane.top_k, row, count, to);
    if (threadIdx.x == 0) *reinterpret_cast<std::uint64_t*>(to + call.label_offset) = label_of(call, row[0]);
    __syncthreads();
  }
}

constexpr const char* kRelaySums = "add the rows of a node";
const Kernel<RelaySumsArguments> note_rows{
    &note_rows_kernel, kMergeThreads, kRelaySums,
    [](const RelaySumsArguments& call, int) { return std::int64_t{kBlocksOfRank} * call.held; }};
const Kernel<RelaySumsArguments> place_sums{&place_sums_kernel, kScanThreads, kRelaySums};
const Kernel<RelaySumsArguments> add_rows{
    &add_rows_kernel, kMergeThreads, kRelaySums, [](const RelaySumsArguments& call, int) {
      return std::int64_t{std::min(call.lane.max_tokens, kMostSumBlocks)};
    }};

}  // namespace

const Kernel<PlaceRowsArguments> kPlaceRowsKernel{
    &place_rows_kernel, kPlaceThreads, "place the rows of a combine",
    [](const PlaceRowsArguments& call, int) { return std::int64_t{call.lane.ranks}; }};
const Kernel<FindRowsArguments> kFindRowsKernel{
    &find_rows_kernel, kFindThreads, "find the rows of a combine",
    [](const FindRowsArguments& call, int) { return std::int64_t{kFindBlocks} * call.lane.ranks; }};
const Kernel<AddOnNodesArguments> kAddOnNodesKernel{
    &add_on_nodes_kernel, kMergeThreads, "add the rows of nodes", [](const AddOnNodesArguments& call, int) {
      return std::int64_t{std::min(call.lane.max_tokens, kMostNodeBlocks)};
    }};

void launch_relay_sums(const RelaySumsArguments& arguments, Stream stream) {
  note_rows(arguments, {}, stream);
  place_sums(arguments, {}, stream);
  add_rows(arguments, {}, stream);
}

}  // namespace ferry::cuda
