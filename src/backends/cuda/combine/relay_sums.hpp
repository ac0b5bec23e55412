// A relay's part of ReductionLevel::node in two hops: it adds the rows that the ranks of its node send to one
// source rank on another node, and forwards one row for each token.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/combine/packed_rows.hpp"

namespace ferry::cuda {

struct RelaySumsArguments {
  LaneView lane;
  DType combine_type;
  CombineRowLayout row;
  std::int32_t row_bytes, label_offset;
  int held;                           // ranks of the node whose rows are here
  ArrivedRows from[kMaxDeviceRanks];  // [held], in ascending order of the ranks
  std::int32_t* row_of;               // [T, held], working memory
  std::int32_t* place_of;             // [T], likewise
  std::byte* out;       // the sums, in the order of the tokens, each with the label of its first row
  std::int32_t* count;  // out, in pinned memory: number of sums
};

// Rows without a label of this call, which only a damaged plan causes, are left out.
void launch_relay_sums(const RelaySumsArguments& arguments, cudaStream_t stream);

void prepare_relay_sums();  // loads the kernels on the current device

}  // namespace ferry::cuda
