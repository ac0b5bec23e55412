// all_gather_v and reduce_scatter_v: rows of all ranks without routing. One launch each.
#pragma once

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {

// Arguments of both operations.
struct GatherArguments {
  LaneView lane;
  AgreedOptions terms;
  const std::byte* rows;
  std::byte* out;  // `gathered`, or `sums`
  std::int64_t row_bytes;
  std::int64_t held;                 // as GatherTerms::held
  std::int64_t place;                // GatherTerms::place + 1; 0: apart
  std::int32_t count;                // this rank's rows; with device_count the most it may be
  std::int32_t first, members;       // the ranks that gather from each other: [first, first + members)
  const std::int32_t* device_count;  // or null
};

// Blocks of values that one rank adds, in this order. Used over an engine, which has delivered them.
struct AddedBlocks {
  const std::byte* block[kMaxDeviceRanks];
  std::int32_t first = 0, members;
  std::byte* out;
  std::int64_t bytes;  // of a block
};

extern const Kernel<GatherArguments> kAllGatherKernel;
extern const Kernel<GatherArguments> kReduceScatterKernels[3];  // by DType of the values
extern const Kernel<AddedBlocks> kAddBlocksKernels[3];          // by DType of the values

}  // namespace ferry::cuda
