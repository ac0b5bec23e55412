// What a combine brings home to one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {

// What one rank brings to a combine.
struct RankOutputs {
  std::vector<std::byte> rows;      // [total, hidden], dense; only kept rows are read
  std::vector<float> weights;       // [total] if Results::weighted
  std::vector<float> topk_weights;  // [tokens, top_k] if Results::topk_weighted
  std::vector<float> row_values;    // [total], if one fp32 a row is brought home
};

struct Outcome {
  DType outputs = DType::bf16;
  DType result = DType::bf16;
  Reduction reduction = Reduction::partial;
  bool weighted = false;
  bool topk_weighted = false;
  std::vector<RankOutputs> ranks;
};

// [tokens, hidden], unreduced [tokens, top_k, hidden], dense.
std::vector<std::byte> combined(const Config& config, const RowPositions& positions, const Outcome& outcome,
                                int rank);

// Every row's value at home: [tokens, top_k], 0 where masked or dropped.
std::vector<float> values_home(const RowPositions& positions, const Outcome& outcome, int rank);

// The other way: `values` [tokens, top_k] of every rank to the rows of `rank`: [total], padding 0, untouched
// rows undefined.
std::vector<float> values_at_rows(const RowPositions& positions,
                                  const std::vector<std::vector<float>>& values, int rank);

}  // namespace ferry::oracle
