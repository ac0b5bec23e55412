#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/combine/packed_rows.hpp"

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/combine/row_flags.cuh"
#include "backends/cuda/device/block_sums.cuh"
#include "backends/cuda/protocol/plan_entries.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "backends/cuda/runtime/launch.hpp"

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

}  // namespace

void prepare_packed_rows() {
  load_kernels(&place_rows_kernel, &find_rows_kernel);
}

void launch_place_rows(const PlaceRowsArguments& arguments, cudaStream_t stream) {
  launch(&place_rows_kernel, arguments, kPlaceThreads, arguments.lane.ranks, stream,
         "place the rows of a combine");
}

void launch_find_rows(const FindRowsArguments& arguments, cudaStream_t stream) {
  launch(&find_rows_kernel, arguments, kFindThreads, kFindBlocks * arguments.lane.ranks, stream,
         "find the rows of a combine");
}

}  // namespace ferry::cuda
