// Launches before and after the kernel of a dispatch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/runtime/launch.hpp"
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

// Before: computes LaneState::input_hash for a dispatch of replicated input from ids. Ranks compare this hash
// of N and ids, to detect different inputs.
extern const Kernel<DispatchArguments> kInputHashKernel;

// Before: writes the rows of shared experts, their sources, weights, dot products and groups; dispatch writes
// padding rows. These rows are this rank's own tokens, so it waits for no rank. `dot_rows` must be null: the
// dot products of shared rows are 0.
extern const Kernel<DispatchArguments> kSharedRowsKernel;

// After: copies scales that the dispatch has stored by rows to their tiles (docs/formats.md, "Scales as
// tiles"). So the kernels of dispatch know rows and columns only, and calls without tiles do not pay for
// them.
extern const Kernel<ScaleTileArguments> kScaleTilesKernel;

}  // namespace ferry::cuda
