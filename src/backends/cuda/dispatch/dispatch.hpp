// Dispatch on GPUs: the arguments of its kernels, and their launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backends/cuda/dispatch/dispatch_mode.hpp"
#include "backends/cuda/dispatch/send_partition.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "ferry/exchange.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "layout/exchange_layout.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cuda {

// Bytes from the beginning of a block's shared memory to its arrays (block_arrays.cuh).
struct BlockOffsets {
  std::int32_t tables;  // of the BlockTables, which are:
  std::int32_t capacity, first_physical, physical_of, expert_of, rank_of;
  std::int32_t own_first_row, first_row, group_begin, group_count, messages,
      aligned_before;         // of the RowOffsets
  std::int32_t route_counts;  // RouteCounts
  std::int32_t streams;       // the warps' buffers for rows in flight
};

struct DispatchArguments {
  LaneView lane;
  AgreedOptions terms;

  // The caller's input.
  const std::byte* part[kMaxParts];
  std::int64_t stride[kMaxParts];
  std::int64_t tokens;                // N, or its upper bound
  const std::int32_t* device_tokens;  // N in device memory, or null
  DType type;
  const void* ids;
  bool wide_ids;  // int64
  const float* weights;
  PlanView plan;
  bool by_plan;  // the plan is the caller's and complete; ids are not read
  const void* dot_rows;
  DType dot_type;
  bool apply_weights;
  const float* global_scale;  // of NVFP4, or null for 1
  std::int32_t hash_option;   // replicated input: index in `terms` of the hash of N and ids

  // The form in which a token travels.
  Encoding encoding;
  PartList parts;  // of a message
  DeviceMessageLayout message;
  // If rows are encoded at their destination, each with the scale of its expert: [E + S]; else null.
  const float* input_scales;
  Encoding row_encoding;  // of rows that are encoded at their destination
  bool own_staged;        // this rank's own tokens go through staging as well
  bool own_memory;  // part 0 of the received rows lies in the lane's symmetric memory: peers can write to it
                    // directly
  // Blocks by role in the modes of many and of few tokens (dispatch_mode.hpp); a token count in device memory
  // decides between the two when the kernel runs.
  DispatchBlocks many_token_blocks, few_token_blocks;
  SendPartition partition;  // of `tokens` among the senders: set by the launch
  SendPartition
      metadata_partition;  // of `tokens` among the metadata blocks but the coordinator: set by the launch
  Phase phase;
  BlockOffsets shared;  // set by the launch

  // The caller's output.
  PartList received;  // parts of its rows; those of a message unless input_scales are given
  std::byte* received_parts[kMaxParts];
  std::int64_t leading_dimension[kMaxParts];
  std::int32_t group_rows;  // expert_padded: rows of a group; else 0: see column_row()
  float* weight;
  std::int32_t* local_ids;
  std::int32_t* group_of_row;
  float* dots;
  std::int32_t* counts;
  std::int32_t* row_offsets;
  std::int32_t* count_sums;  // or null
};

// Bytes of a block's shared memory.
std::int64_t dispatch_shared_bytes(const LaneView& lane);

// Call on the lane's device before the first launch for it: lets the kernels use that much shared memory.
void prepare_dispatch(const LaneView& lane);

void launch_dispatch(const DispatchArguments& arguments, DispatchMode mode, const LaunchShape& shape,
                     cudaStream_t stream);

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

// Launches before and after the kernel of a dispatch.
//
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
