// The inner loops of the CPU backend: one table of functions for each instruction set, chosen at run time.
// Every table gives the same bits.
//
// Sizes are in bytes or columns (values of a row), any number from 0. Pointers may have any alignment; rows
// that start at multiples of 16 bytes are fast, of 64 bytes fastest. Inputs and outputs must not overlap.
// Nothing throws.
//
// Arithmetic is in fp32, rounding to nearest even, denormals kept. A NaN that is computed or converted is
// 7FFFFFFF, 7FFF, 7FFF or 7F; a NaN that is merely moved keeps its bits (so does a conversion to the same
// type).
#pragma once

#include <cstdint>
#include <span>

#include "ferry/format.hpp"
#include "ferry/types.hpp"

namespace ferry::cpu {

// How results are written.
//   cached     through the cache: for what this core, or another soon, reads again
//   streaming  past the cache, without reading the line first: for much data that is read later. Such stores
//   are
//              not ordered by a release store: call stream_fence() between the last of them and the flag (or
//              anything else) that tells another thread.
enum class Store : int { cached, streaming };

// Orders the streaming stores this thread has made before all its later stores. Whoever publishes data
// written with Store::streaming calls it once, before the release.
void stream_fence();

// y = round(a) to `out_type`, where a = +0 and, rows ascending, a = fma(weight, v, a), or a = a + v without
// weights. v is the row's value rounded to `wire_type` if that is not `row_type`. No rows give +0.
struct RowSum {
  void* out = nullptr;
  DType out_type = DType::bf16;
  const void* const* rows = nullptr;  // [count] pointers to rows
  DType row_type = DType::bf16;
  DType wire_type = DType::bf16;
  const float* weights = nullptr;  // [count], or null: every weight is 1
  int count = 0;
  std::int64_t columns = 0;
  Store store = Store::cached;
  // Rows like these that will be added next, from memory: they are fetched at the pace of this sum.
  const void* const* next = nullptr;  // [next_count]
  int next_count = 0;
};

struct Kernels {
  const char* name;  // "baseline", "avx2", "avx512"

  void (*copy)(void* out, const void* in, std::int64_t bytes, Store store);

  // Writes the same bytes to `count` places and reads them from memory once.
  void (*copy_to_many)(void* const* outs, int count, const void* in, std::int64_t bytes, Store store);

  void (*zero)(void* out, std::int64_t bytes);

  void (*weighted_sum)(const RowSum& sum);

  // out = in, rounded where the type says so.
  void (*convert_row)(void* out, DType out_type, const void* in, DType in_type, std::int64_t columns,
                      Store store);

  // out = round(weight * in), both of `type`.
  void (*weigh_row)(void* out, const void* in, DType type, float weight, std::int64_t columns, Store store);

  // The inner product, in this order and no other:
  //   acc[0..255] = +0; for c ascending: acc[c % 256] = fma(a[c], b[c], acc[c % 256]);
  //   in every group of eight neighbours acc[8g .. 8g+7]: acc[i] += acc[i + 4] (i < 4), then + 2, then + 1;
  //   over the 32 groups' firsts s[g]: s[g] += s[g + 16] (g < 16), then + 8, + 4, + 2, + 1; the result is
  //   s[0].
  float (*dot)(const void* a, DType a_type, const void* b, DType b_type, std::int64_t columns);

  // Quantises a row to e4m3 with 1 x 128 scales, by the formula in format/fp8_block.hpp. `values` gets
  // `columns` bytes; `scales` gets the whole part as it lies in a message, padding zeroed: a multiple of 16
  // bytes (see parts_of). Both through the cache.
  void (*encode_fp8_row)(void* values, void* scales, const void* in, DType in_type, std::int64_t columns,
                         const Fp8Options& options);
};

// The best table for this processor.
const Kernels& kernels();

// Every table this processor can run, slowest first; baseline is always there.
std::span<const Kernels* const> available_kernels();

}  // namespace ferry::cpu
