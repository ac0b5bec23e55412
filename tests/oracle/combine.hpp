// The expected results of combine and of route_values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/topology.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {

// One rank's arguments of a combine.
struct RankOutputs {
  std::vector<std::byte> rows;      // [total, hidden] dense; only kept rows are read
  std::vector<float> weights;       // [total] if ExpertOutputs::weighted
  std::vector<float> topk_weights;  // [tokens, top_k] if ExpertOutputs::topk_weighted
  std::vector<float> row_values;    // [total] if the call has row_values
};

// The arguments of all ranks to a combine.
struct ExpertOutputs {
  DType outputs = DType::bf16;  // type of the experts' rows
  DType result = DType::bf16;   // type of the result
  Reduction reduction = Reduction::partial;
  bool weighted = false;        // the call has row_weights
  bool topk_weighted = false;   // the call has topk_weights
  bool shared_outputs = false;  // the call has shared_outputs
  std::vector<RankOutputs> ranks;
};

// The result on `rank`, dense: [tokens, hidden]; unreduced: [tokens, top_k, hidden]. `topology`: the nodes,
// by which `partial` adds if the configuration says so.
std::vector<std::byte> combined(const Config& config, const RowPositions& positions,
                                const ExpertOutputs& inputs, const Topology& topology, int rank);

// The result, [tokens, hidden] of `type`, after the epilogue: y = round(fma(scale, y, r)), with r of
// `residual`, dense, or -0 if it is null.
std::vector<std::byte> with_epilogue(DType type, std::vector<std::byte> result, float scale,
                                     const std::byte* residual);

// combine's shared_outputs on `rank`: the rows of the shared experts, [shared experts, tokens, hidden],
// dense.
std::vector<std::byte> returned_shared_rows(const Config& config, const RowPositions& positions,
                                            const ExpertOutputs& inputs, int rank);

// combine's route_values on `rank`: the value of each route's row, [tokens, top_k]; 0 if masked or dropped.
std::vector<float> returned_row_values(const RowPositions& positions, const ExpertOutputs& inputs, int rank);

// Exchange::route_values on `rank`: the value of each row's route, [total]. `values` [ranks][tokens, top_k].
// Padding rows and rows of shared experts get 0; rows that are never written are undefined.
std::vector<float> values_at_rows(const RowPositions& positions,
                                  const std::vector<std::vector<float>>& values, int rank);

}  // namespace ferry::oracle
