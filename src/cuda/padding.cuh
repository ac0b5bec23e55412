// What arrivals have between groups: rows that nobody sends.
#pragma once

#include "cuda/block_arrays.cuh"
#include "layout/plan_layout.hpp"

namespace ferry::cuda {

// By one warp of `workers`: rows between groups.
static __device__ __noinline__ void write_padding(const DispatchArguments& call, const Places& places,
                                                  int worker, int workers, const PlanView& plan) {
  const LaneView& lane = call.lane;
  if (lane.layout == Layout::rank_major) return;
  const int thread = threadIdx.x % 32;
  for (int group = worker; group < lane.groups; group += workers) {
    const std::int64_t begin = places.begin[group], count = places.count[group];
    const std::int64_t aligned =
        min(std::int64_t{lane.by_alignment.round_up(static_cast<std::int32_t>(count))}, lane.capacity);
    const std::int64_t end = lane.layout == Layout::expert_padded ? begin + aligned : places.begin[group + 1];
    for (std::int64_t row = begin + count + thread; row < end; row += 32) {
      plan.sources[row] = Source{};
      if (call.weight != nullptr) call.weight[row] = 0;
      if (call.dots != nullptr) call.dots[row] = 0;
      if (call.group_of_row != nullptr) call.group_of_row[row] = -1;
    }
    if (!lane.zero_padding) continue;
    for (std::int64_t row = begin + count; row < end; ++row) {
      for (int p = 0; p < call.parts.count; ++p) {
        const PartLayout& part = call.parts.part[p];
        for (std::int64_t byte = 4 * thread; byte < part.row_bytes; byte += 128) {
          const std::int64_t element = byte / part.element_bytes;
          *reinterpret_cast<std::uint32_t*>(call.arrived[p] +
                                            element_offset(part, row, element, call.leading[p]) +
                                            byte % part.element_bytes) = 0;
        }
      }
    }
  }
}

}  // namespace ferry::cuda
