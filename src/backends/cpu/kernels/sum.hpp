// Weighted sums of rows.
#pragma once

#include "backends/cpu/kernels/rows.hpp"

namespace ferry::cpu {
namespace {

constexpr int kRowsAPass = 4;

// Up to four rows of a block, by name: the vectoriser has to see each pointer and weight as a constant of its
// loop.
struct Pass {
  const char* row[kRowsAPass];
  float weight[kRowsAPass];
};

// Rows as the wire carries them, where that is not how they lie.
using Carried = char[kRowsAPass][kBlock * sizeof(float)];

Pass pass_of(const RowSum& sum, int begin, std::int64_t first, std::int64_t columns, Carried& carried) {
  const std::int64_t bytes = sum.row_type == DType::fp32 ? 4 : 2;
  Pass pass;
  for (int i = 0; i < kRowsAPass; ++i) {
    const int row = begin + i < sum.count ? begin + i : begin;
    pass.row[i] = static_cast<const char*>(sum.rows[row]) + first * bytes;
    pass.weight[i] = sum.weights ? sum.weights[row] : 1.0f;  // fma(1, v, a) is a + v
    if (sum.row_type == sum.wire_type) continue;
    convert_row(carried[i], sum.wire_type, pass.row[i], sum.row_type, columns, Store::cached);
    pass.row[i] = carried[i];
  }
  return pass;
}

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

struct Pair {
  float low, high;
};

// Calls use(column, sum) with the sum of kRows rows, in order, added to start(column).
template <class Row, int kRows, class Start, class Use>
FERRY_HD void add_rows(const Pass& pass, std::int64_t columns, Start start, Use use) {
  const char* const __restrict row0 = pass.row[0];
  const char* const __restrict row1 = pass.row[1];
  const char* const __restrict row2 = pass.row[2];
  const char* const __restrict row3 = pass.row[3];
  const float weight0 = pass.weight[0], weight1 = pass.weight[1], weight2 = pass.weight[2],
              weight3 = pass.weight[3];
  for (std::int64_t c = 0; c < columns; ++c) {
    float sum = fused_multiply_add(weight0, Row::value(load<Row>(row0, c)), start(c));
    if constexpr (kRows > 1) sum = fused_multiply_add(weight1, Row::value(load<Row>(row1, c)), sum);
    if constexpr (kRows > 2) sum = fused_multiply_add(weight2, Row::value(load<Row>(row2, c)), sum);
    if constexpr (kRows > 3) sum = fused_multiply_add(weight3, Row::value(load<Row>(row3, c)), sum);
    use(c, sum);
  }
}

// The last pass rounds; the first starts from +0. Loops without sums in memory serve up to four rows.
template <class Row, class Out, int kRows>
void pass_rows(char* __restrict out, float* __restrict sums, const Pass& pass, bool start, bool last,
               std::int64_t columns) {
  auto zero = [](std::int64_t) { return 0.0f; };
  auto stored = [=](std::int64_t c) { return sums[c]; };
  auto keep = [=](std::int64_t c, float sum) { sums[c] = sum; };
  auto round = [=](std::int64_t c, float sum) { store<Out>(out, c, Out::round(sum)); };
  if (start && last) {
    add_rows<Row, kRows>(pass, columns, zero, round);
  } else if (start) {
    add_rows<Row, kRows>(pass, columns, zero, keep);
  } else if (last) {
    add_rows<Row, kRows>(pass, columns, stored, round);
  } else {
    add_rows<Row, kRows>(pass, columns, stored, keep);
  }
}

// Rows and sums of bf16, two values a word: the vectoriser then has one width of lane in the whole loop and
// moves nothing between lanes. `low` and `high` are sums of the lower and the upper values.
template <int kRows, class Start, class Use>
FERRY_HD void add_words(const Pass& pass, std::int64_t words, Start start, Use use) {
  const char* const __restrict row0 = pass.row[0];
  const char* const __restrict row1 = pass.row[1];
  const char* const __restrict row2 = pass.row[2];
  const char* const __restrict row3 = pass.row[3];
  const float weight0 = pass.weight[0], weight1 = pass.weight[1], weight2 = pass.weight[2],
              weight3 = pass.weight[3];
  auto low = [](std::uint32_t word) { return float_of(word << 16); };
  auto high = [](std::uint32_t word) { return float_of(word & 0xFFFF0000u); };
  for (std::int64_t w = 0; w < words; ++w) {
    auto add = [&](const char* row, float weight, Pair sum) {
      const std::uint32_t word = load<Fp32>(row, w);
      return Pair{fused_multiply_add(weight, low(word), sum.low),
                  fused_multiply_add(weight, high(word), sum.high)};
    };
    Pair sum = add(row0, weight0, start(w));
    if constexpr (kRows > 1) sum = add(row1, weight1, sum);
    if constexpr (kRows > 2) sum = add(row2, weight2, sum);
    if constexpr (kRows > 3) sum = add(row3, weight3, sum);
    use(w, sum);
  }
}

template <int kRows>
void pass_words(char* __restrict out, float* __restrict sums, const Pass& pass, bool start, bool last,
                std::int64_t words) {
  float* const __restrict high_sums = sums + kBlock / 2;
  auto zero = [](std::int64_t) { return Pair{0.0f, 0.0f}; };
  auto stored = [=](std::int64_t w) { return Pair{sums[w], high_sums[w]}; };
  auto keep = [=](std::int64_t w, Pair sum) {
    sums[w] = sum.low;
    high_sums[w] = sum.high;
  };
  auto round = [=](std::int64_t w, Pair sum) {
    store<Fp32>(out, w, fp32_to_bf16_above(sum.low) >> 16 | (fp32_to_bf16_above(sum.high) & 0xFFFF0000u));
  };
  if (start && last) {
    add_words<kRows>(pass, words, zero, round);
  } else if (start) {
    add_words<kRows>(pass, words, zero, keep);
  } else if (last) {
    add_words<kRows>(pass, words, stored, round);
  } else {
    add_words<kRows>(pass, words, stored, keep);
  }
}

// One or two rows wait for memory more than they compute, and the processor's own prefetching starts late on
// every page of a row. With more rows the memory is busy anyway, and prefetching only gets in the way.
void prefetch_ahead(const RowSum& sum, std::int64_t first) {
  constexpr std::int64_t kAhead = 2048, kLength = 1024;  // bytes
  if (sum.count > 2 || sum.next_count > 0) return;
  const std::int64_t bytes = sum.row_type == DType::fp32 ? 4 : 2;
  const std::int64_t begin = first * bytes + kAhead;
  const std::int64_t end = least(begin + kLength, sum.columns * bytes);
  for (int row = 0; row < sum.count; ++row) {
    const char* const at = static_cast<const char*>(sum.rows[row]);
    for (std::int64_t line = begin; line < end; line += kLine) __builtin_prefetch(at + line);
  }
}

// What comes next is asked for a little at a time: many requests at once would hold up this sum's own.
void prefetch_next(const RowSum& sum, std::int64_t first, std::int64_t columns) {
  const std::int64_t bytes = sum.row_type == DType::fp32 ? 4 : 2;
  for (std::int64_t at = first * bytes; at < (first + columns) * bytes; at += kLine) {
    for (int row = 0; row < sum.next_count; ++row) {
      __builtin_prefetch(static_cast<const char*>(sum.next[row]) + at, 0, 2);
    }
  }
}

template <class Row, class Out, int kRows>
void pass_block(char* out, float* sums, const Pass& pass, bool start, bool last, std::int64_t columns) {
  if constexpr (kSame<Row, Bf16> && kSame<Out, Bf16>) {
    if (columns % 2 == 0) return pass_words<kRows>(out, sums, pass, start, last, columns / 2);
  }
  pass_rows<Row, Out, kRows>(out, sums, pass, start, last, columns);
}

template <class Row, class Out>
void sum_block(char* out, float* sums, const RowSum& sum, std::int64_t first, std::int64_t columns) {
  alignas(kLine) Carried carried;
  for (int row = 0; row < sum.count; row += kRowsAPass) {
    const Pass pass = pass_of(sum, row, first, columns, carried);
    const bool start = row == 0, last = row + kRowsAPass >= sum.count;
    switch (sum.count - row) {
      case 1:
        pass_block<Row, Out, 1>(out, sums, pass, start, last, columns);
        break;
      case 2:
        pass_block<Row, Out, 2>(out, sums, pass, start, last, columns);
        break;
      case 3:
        pass_block<Row, Out, 3>(out, sums, pass, start, last, columns);
        break;
      default:
        pass_block<Row, Out, 4>(out, sums, pass, start, last, columns);
    }
  }
}

void weighted_sum(const RowSum& sum) {
  if (sum.count == 0) return zero(sum.out, sum.columns * (sum.out_type == DType::fp32 ? 4 : 2));
  with_type(sum.out_type, [&sum](auto out_type) {
    with_type(sum.wire_type, [&sum](auto wire_type) {
      using Out = decltype(out_type);
      for_blocks<Out>(sum.out, sum.columns, sum.store,
                      [&](char* out, std::int64_t first, std::int64_t count) {
                        alignas(kLine) float sums[kBlock];
                        prefetch_ahead(sum, first);
                        prefetch_next(sum, first, count);
                        sum_block<decltype(wire_type), Out>(out, sums, sum, first, count);
                      });
    });
  });
}

}  // namespace
}  // namespace ferry::cpu
