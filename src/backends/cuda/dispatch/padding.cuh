// Writes the padding rows between the groups of a dispatch result: rows that no rank sends.
#pragma once

#include "backends/cuda/dispatch/block_arrays.cuh"
#include "layout/plan_layout.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// The padding rows after a group's last row.
struct PaddingRows {
  std::int64_t begin, end;

  __device__ static PaddingRows of(const LaneView& lane, const RowOffsets& offsets, int group) {
    const std::int64_t first = offsets.group_begin[group], count = offsets.group_count[group];
    const std::int64_t aligned =
        min(std::int64_t{lane.by_alignment.round_up(static_cast<std::int32_t>(count))}, lane.capacity);
    return {first + count, lane.layout == Layout::expert_padded
                               ? first + aligned
                               : min(std::int64_t{offsets.group_begin[group + 1]}, lane.capacity)};
  }
};

// [warp] Writes the plan's and the result's entries of padding rows, and zeroes the rows if the exchange does
// so.
__device__ inline void write_padding_rows(const DispatchArguments& call, const PaddingRows& rows,
                                          const PlanView& plan) {
  const int thread = threadIdx.x % 32;
  for (std::int64_t row = rows.begin + thread; row < rows.end; row += 32) {
    plan.sources[row] = Source{};
    if (call.weight != nullptr) call.weight[row] = 0;
    if (call.dots != nullptr) call.dots[row] = 0;
    if (call.group_of_row != nullptr) call.group_of_row[row] = -1;
  }
  if (!call.lane.zero_padding) return;
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    for (int p = 0; p < call.received.count; ++p) {
      const PartLayout& part = call.received.part[p];
      const std::int64_t leading = call.leading_dimension[p],
                         to = column_row(part, row, call.group_rows, leading);
      for (std::int64_t byte = 4 * thread; byte < part.row_bytes; byte += 128) {
        const std::int64_t element = byte / part.element_bytes;
        *reinterpret_cast<std::uint32_t*>(
            call.received_parts[p] + element_offset(part, to, element, leading) + byte % part.element_bytes) =
            0;
      }
    }
  }
}

// [warp] Writes the padding of every group that falls to warp `worker` of `workers`. Few groups have any, so
// each thread looks at a group of its own first.
static __device__ __noinline__ void write_padding(const DispatchArguments& call, const RowOffsets& offsets,
                                                  int worker, int workers, const PlanView& plan) {
  const LaneView& lane = call.lane;
  if (lane.layout == Layout::rank_major) return;
  for (int first = worker; first < lane.groups; first += 32 * workers) {
    const int mine = first + static_cast<int>(threadIdx.x % 32) * workers;
    bool some = false;
    if (mine < lane.groups) {
      const PaddingRows rows = PaddingRows::of(lane, offsets, mine);
      some = rows.begin < rows.end;
    }
    for (std::uint32_t left = __ballot_sync(~0u, some); left != 0; left &= left - 1) {
      const int group = first + (__ffs(static_cast<int>(left)) - 1) * workers;
      write_padding_rows(call, PaddingRows::of(lane, offsets, group), plan);
    }
  }
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
