// Weighted sums of rows, in passes over up to four rows at a time.
#pragma once

#include "backends/cpu/kernels/rows.hpp"

namespace ferry::cpu {
namespace {

constexpr int kRowsPerPass = 4;

// The rows of one pass, and their weights. The loops copy each into a variable of its own, because the
// vectoriser must see every pointer and weight as loop-invariant.
struct Pass {
  const char* row[kRowsPerPass];
  float weight[kRowsPerPass];
};

// The rows of a pass rounded to RowSum::combine_type, if that differs from their type.
using RoundedRows = char[kRowsPerPass][kBlock * sizeof(float)];

Pass pass_of(const RowSum& sum, int begin, std::int64_t first, std::int64_t columns, RoundedRows& rounded) {
  const std::int64_t bytes = sum.row_type == DType::fp32 ? 4 : 2;
  Pass pass;
  for (int i = 0; i < kRowsPerPass; ++i) {
    const int row = begin + i < sum.count ? begin + i : begin;
    pass.row[i] = static_cast<const char*>(sum.rows[row]) + first * bytes;
    pass.weight[i] = sum.weights ? sum.weights[row] : 1.0f;  // fma(1, v, a) is a + v
    if (sum.row_type == sum.combine_type) continue;
    convert_row(rounded[i], sum.combine_type, pass.row[i], sum.row_type, columns, Store::cached);
    pass.row[i] = rounded[i];
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

// Calls use(column, sum) for every column: sum = start(column) plus kRows rows, in order.
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

// One pass. The first pass starts from +0, the last rounds the result; passes between keep their sums in
// memory. A sum of up to four rows is one pass and keeps nothing in memory.
template <class Row, class Out, int kRows>
void pass_rows(char* __restrict out, float* __restrict sums, const Pass& pass, bool start, bool last,
               std::int64_t columns) {
  auto zero = [](std::int64_t) { return 0.0f; };
  auto load_sum = [=](std::int64_t c) { return sums[c]; };
  auto store_sum = [=](std::int64_t c, float sum) { sums[c] = sum; };
  auto round = [=](std::int64_t c, float sum) { store<Out>(out, c, Out::round(sum)); };
  if (start && last) {
    add_rows<Row, kRows>(pass, columns, zero, round);
  } else if (start) {
    add_rows<Row, kRows>(pass, columns, zero, store_sum);
  } else if (last) {
    add_rows<Row, kRows>(pass, columns, load_sum, round);
  } else {
    add_rows<Row, kRows>(pass, columns, load_sum, store_sum);
  }
}

// bf16 rows and results, as 32-bit words of two values. The vectoriser then sees one lane width in the whole
// loop and moves nothing between lanes. `low` and `high` are the sums of the lower and the upper values.
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
  auto load_sum = [=](std::int64_t w) { return Pair{sums[w], high_sums[w]}; };
  auto store_sum = [=](std::int64_t w, Pair sum) {
    sums[w] = sum.low;
    high_sums[w] = sum.high;
  };
  auto round = [=](std::int64_t w, Pair sum) {
    store<Fp32>(out, w, fp32_to_bf16_above(sum.low) >> 16 | (fp32_to_bf16_above(sum.high) & 0xFFFF0000u));
  };
  if (start && last) {
    add_words<kRows>(pass, words, zero, round);
  } else if (start) {
    add_words<kRows>(pass, words, zero, store_sum);
  } else if (last) {
    add_words<kRows>(pass, words, load_sum, round);
  } else {
    add_words<kRows>(pass, words, load_sum, store_sum);
  }
}

// Sums of one or two rows are bound by memory latency, and the hardware prefetcher restarts on every page of
// a row. Sums of more rows keep the memory busy without prefetching, which would only compete with them.
void prefetch_ahead(const RowSum& sum, std::int64_t first) {
  constexpr std::int64_t kAhead = 2048, kLength = 1024;  // bytes
  if (sum.count > 2 || sum.next_count > 0) return;
  const std::int64_t bytes = sum.row_type == DType::fp32 ? 4 : 2;
  const std::int64_t begin = first * bytes + kAhead;
  const std::int64_t end = min_of(begin + kLength, sum.columns * bytes);
  for (int row = 0; row < sum.count; ++row) {
    const char* const at = static_cast<const char*>(sum.rows[row]);
    for (std::int64_t line = begin; line < end; line += kLine) __builtin_prefetch(at + line);
  }
}

// Prefetches the next sum's rows block by block: many requests at once would delay this sum's own loads.
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
  alignas(kLine) RoundedRows rounded;
  for (int row = 0; row < sum.count; row += kRowsPerPass) {
    const Pass pass = pass_of(sum, row, first, columns, rounded);
    const bool start = row == 0, last = row + kRowsPerPass >= sum.count;
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

// A block of the result while it is in the cache. Adding -0 changes no value.
template <class Out>
void scale_and_add(char* __restrict out, const char* __restrict residual, float scale, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; ++c) {
    const float added = residual != nullptr ? Out::value(load<Out>(residual, c)) : -0.0f;
    store<Out>(out, c, Out::round(fused_multiply_add(scale, Out::value(load<Out>(out, c)), added)));
  }
}

template <class Out>
void finish_block(char* out, const RowSum& sum, std::int64_t first, std::int64_t columns) {
  constexpr std::int64_t kBytes = sizeof(typename Out::Bits);
  const auto* const residual = static_cast<const char*>(sum.residual);
  scale_and_add<Out>(out, residual != nullptr ? residual + first * kBytes : nullptr, sum.scale, columns);
}

void weighted_sum(const RowSum& sum) {
  if (sum.count == 0 && !sum.epilogue)
    return zero(sum.out, sum.columns * (sum.out_type == DType::fp32 ? 4 : 2));
  with_type(sum.out_type, [&sum](auto out_type) {
    with_type(sum.combine_type, [&sum](auto combine_type) {
      using Out = decltype(out_type);
      const auto write = [&](char* out, std::int64_t first, std::int64_t count) {
        alignas(kLine) float sums[kBlock];
        prefetch_ahead(sum, first);
        prefetch_next(sum, first, count);
        if (sum.count == 0) zero(out, count * static_cast<std::int64_t>(sizeof(typename Out::Bits)));
        sum_block<decltype(combine_type), Out>(out, sums, sum, first, count);
        if (sum.epilogue) finish_block<Out>(out, sum, first, count);
      };
      for_blocks<Out>(sum.out, sum.columns, sum.store, write, sum.residual == sum.out);
    });
  });
}

// The dot product of two rows, with its additions in the order that kernels.hpp defines.

constexpr std::int64_t kDotSums = 256;
constexpr std::int64_t kDotGroup = 8;

template <class A, class B>
void add_products(float* __restrict sums, const char* __restrict a, const char* __restrict b,
                  std::int64_t count) {
  for (std::int64_t c = 0; c < count; ++c) {
    sums[c] = fused_multiply_add(A::value(load<A>(a, c)), B::value(load<B>(b, c)), sums[c]);
  }
}

// Adds the 256 partial sums in the fixed order.
float reduce(float* sums) {
  for (std::int64_t distance = kDotGroup / 2; distance >= 1; distance /= 2) {
    for (std::int64_t group = 0; group < kDotSums; group += kDotGroup) {
      for (std::int64_t i = 0; i < distance; ++i) sums[group + i] += sums[group + i + distance];
    }
  }
  for (std::int64_t distance = kDotSums / 2; distance >= kDotGroup; distance /= 2) {
    for (std::int64_t first = 0; first < distance; first += kDotGroup) sums[first] += sums[first + distance];
  }
  return sums[0];
}

template <class A, class B>
float dot_as(const void* a, const void* b, std::int64_t columns) {
  constexpr std::int64_t kBytesA = sizeof(typename A::Bits);
  constexpr std::int64_t kBytesB = sizeof(typename B::Bits);
  alignas(64) float sums[kDotSums] = {};
  for (std::int64_t first = 0; first < columns; first += kDotSums) {
    const std::int64_t left = columns - first;
    add_products<A, B>(sums, static_cast<const char*>(a) + first * kBytesA,
                       static_cast<const char*>(b) + first * kBytesB, left < kDotSums ? left : kDotSums);
  }
  return canonical(reduce(sums));
}

float dot(const void* a, DType a_type, const void* b, DType b_type, std::int64_t columns) {
  return with_type(a_type, [=](auto type_a) {
    return with_type(b_type,
                     [=](auto type_b) { return dot_as<decltype(type_a), decltype(type_b)>(a, b, columns); });
  });
}

}  // namespace

}  // namespace ferry::cpu
