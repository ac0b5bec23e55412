// Weighted sums of rows.
#pragma once

#include "cpu/kernels/rows.hpp"

namespace ferry::cpu {
namespace {

// The value of a row of type Row as the wire carries it.
template <class Row, class Wire>
struct Carried {
  FERRY_HD static float value(typename Row::Bits bits) { return Wire::value(Wire::round(Row::value(bits))); }
};

template <class Type>
struct Carried<Type, Type> {
  FERRY_HD static float value(typename Type::Bits bits) { return Type::value(bits); }
};

struct Weighted {
  FERRY_HD static float add(float sum, float weight, float value) {
    return fused_multiply_add(weight, value, sum);
  }
};

struct Unweighted {
  FERRY_HD static float add(float sum, float, float value) { return sum + value; }
};

// Adds four rows, in order, to the sums of a block: four rows a pass load and store the sums a quarter as
// often.
template <class Row, class Wire, class Weighting>
void add_four(float* __restrict sums, const void* const* rows, const float* weights, std::int64_t first,
              std::int64_t columns) {
  using Value = Carried<Row, Wire>;
  constexpr std::int64_t kBytes = sizeof(typename Row::Bits);
  const char* const __restrict row0 = static_cast<const char*>(rows[0]) + first * kBytes;
  const char* const __restrict row1 = static_cast<const char*>(rows[1]) + first * kBytes;
  const char* const __restrict row2 = static_cast<const char*>(rows[2]) + first * kBytes;
  const char* const __restrict row3 = static_cast<const char*>(rows[3]) + first * kBytes;
  const float w0 = weights[0], w1 = weights[1], w2 = weights[2], w3 = weights[3];
  for (std::int64_t c = 0; c < columns; ++c) {
    float sum = sums[c];
    sum = Weighting::add(sum, w0, Value::value(load<Row>(row0, c)));
    sum = Weighting::add(sum, w1, Value::value(load<Row>(row1, c)));
    sum = Weighting::add(sum, w2, Value::value(load<Row>(row2, c)));
    sum = Weighting::add(sum, w3, Value::value(load<Row>(row3, c)));
    sums[c] = sum;
  }
}

template <class Row, class Wire, class Weighting>
void add_one(float* __restrict sums, const void* row, float weight, std::int64_t first,
             std::int64_t columns) {
  using Value = Carried<Row, Wire>;
  constexpr std::int64_t kBytes = sizeof(typename Row::Bits);
  const char* const __restrict values = static_cast<const char*>(row) + first * kBytes;
  for (std::int64_t c = 0; c < columns; ++c) {
    sums[c] = Weighting::add(sums[c], weight, Value::value(load<Row>(values, c)));
  }
}

template <class Row, class Wire, class Weighting>
void sum_block(float* sums, const RowSum& sum, std::int64_t first, std::int64_t columns) {
  constexpr float kNoWeights[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  __builtin_memset(sums, 0, static_cast<std::size_t>(columns) * sizeof(float));
  int row = 0;
  for (; row + 4 <= sum.count; row += 4) {
    add_four<Row, Wire, Weighting>(sums, sum.rows + row, sum.weights ? sum.weights + row : kNoWeights, first,
                                   columns);
  }
  for (; row < sum.count; ++row) {
    add_one<Row, Wire, Weighting>(sums, sum.rows[row], sum.weights ? sum.weights[row] : 1.0f, first, columns);
  }
}

template <class Out>
void round_block(char* __restrict out, const float* __restrict sums, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; ++c) store<Out>(out, c, Out::round(sums[c]));
}

using SumBlock = void (*)(float* sums, const RowSum& sum, std::int64_t first, std::int64_t columns);

SumBlock sum_block_of(const RowSum& sum) {
  return with_type(sum.row_type, [&sum](auto row) {
    return with_type(sum.wire_type, [&sum](auto wire) -> SumBlock {
      using Row = decltype(row);
      using Wire = decltype(wire);
      return sum.weights ? sum_block<Row, Wire, Weighted> : sum_block<Row, Wire, Unweighted>;
    });
  });
}

void weighted_sum(const RowSum& sum) {
  const SumBlock add_rows = sum_block_of(sum);
  with_type(sum.out_type, [&](auto out_type) {
    using Out = decltype(out_type);
    for_blocks<Out>(sum.out, sum.columns, sum.store, [&](char* out, std::int64_t first, std::int64_t count) {
      alignas(kLine) float sums[kBlock];
      add_rows(sums, sum, first, count);
      round_block<Out>(out, sums, count);
    });
  });
}

}  // namespace
}  // namespace ferry::cpu
