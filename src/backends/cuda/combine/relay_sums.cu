#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/combine/relay_sums.hpp"

#include "backends/cuda/combine/merge_rows.cuh"
#include "backends/cuda/device/block_sums.cuh"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {
namespace {

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

}  // namespace

void prepare_relay_sums() {
  load_kernels(&note_rows_kernel, &place_sums_kernel, &add_rows_kernel);
}

void launch_relay_sums(const RelaySumsArguments& arguments, cudaStream_t stream) {
  const int tokens = arguments.lane.max_tokens;
  constexpr const char* kAction = "add the rows of a node";
  launch(&note_rows_kernel, arguments, kMergeThreads, kBlocksOfRank * arguments.held, stream, kAction);
  launch(&place_sums_kernel, arguments, kScanThreads, 1, stream, kAction);
  launch(&add_rows_kernel, arguments, kMergeThreads, tokens < kMostSumBlocks ? tokens : kMostSumBlocks,
         stream, kAction);
}

}  // namespace ferry::cuda
