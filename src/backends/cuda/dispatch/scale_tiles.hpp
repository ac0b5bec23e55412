// Scales as tiles on device memory: after a dispatch has stored its scales by rows, a launch of its own
// copies them to their tiles (docs/formats.md, "Scales as tiles").
//
// So the kernels of dispatch know rows and columns only, and calls without tiles do not pay for them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backends/cuda/protocol/lane_view.hpp"
#include "ferry/types.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cuda {

inline constexpr int kTileThreads = 512;

struct ScaleTileArguments {
  Layout layout;
  std::int32_t groups;
  std::int64_t capacity;      // expert_padded: rows that a group has room for
  std::int64_t rows;          // rows that there is memory for, in all groups
  const PlanHeader* by_plan;  // of a dispatch by a plan, which may have fewer rows; otherwise null

  // What the dispatch has written: counts [G], row_offsets [G + 1], scales [rows, words].
  const std::int32_t* counts;
  const std::int32_t* row_offsets;
  const std::byte* scales;
  std::int32_t words;  // of four scales, in a row

  std::byte* tiles;
  std::int32_t* tile_offsets;  // [G + 1]
};

// Call on the lane's device before its first launch: loads the kernel.
void prepare_scale_tiles();

// `blocks`: at most.
void launch_scale_tiles(const ScaleTileArguments& arguments, int blocks, cudaStream_t stream);

}  // namespace ferry::cuda
