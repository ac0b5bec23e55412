// The inner loops of the CPU backend: a table of functions for each instruction set, chosen at run time.
// Every table computes the same bits.
//
// Sizes are in bytes or columns (values of a row) and may be 0. Pointers may have any alignment; rows aligned
// to 16 bytes are fast, to 64 bytes fastest. Inputs and outputs must not overlap, but a sum may replace its
// residual. No function throws.
//
// Arithmetic is in fp32, rounded to nearest even, with denormals. A NaN that is computed or converted becomes
// 7FFFFFFF (fp32), 7FFF (fp16, bf16) or 7F (e4m3). A NaN that is copied, or converted to its own type, keeps
// its bits.
#pragma once

#include <cstdint>
#include <span>

#include "ferry/types.hpp"
#include "format/encoding.hpp"

namespace ferry::cpu {

// How results are written.
enum class Store : int {
  cached,     // through the cache: for data that this core reads again, or another core reads soon
  streaming,  // past the cache, without loading the line: for large data that is read later
};

// Orders this thread's earlier streaming stores before its later stores. A release store alone does not order
// streaming stores: call this once between the last of them and the release store that publishes the data.
void stream_fence();

// A weighted sum of rows, per column: a = +0; for each row, ascending: a = fma(weight, v, a), or a = a + v
// without weights; out = round(a) to `out_type`. v is the row's value, rounded to `combine_type` if that
// differs from `row_type`. Without rows the result is +0. With an epilogue out = round(fma(scale, out, r)), r
// of the residual.
struct RowSum {
  void* out = nullptr;
  DType out_type = DType::bf16;
  const void* const* rows = nullptr;  // [count] pointers to rows
  DType row_type = DType::bf16;
  DType combine_type = DType::bf16;
  const float* weights = nullptr;  // [count], or null: every weight is 1
  int count = 0;
  std::int64_t columns = 0;
  Store store = Store::cached;
  bool epilogue = false;
  const void* residual = nullptr;  // row of `out_type`, or null: nothing is added
  float scale = 1.0f;
  // Rows of the next sum, to be prefetched from memory while this sum is computed.
  const void* const* next = nullptr;  // [next_count]
  int next_count = 0;
};

// The parts of a quantised row, as in a message.
struct EncodedRow {
  void* values = nullptr;
  void* scales = nullptr;     // zero-padded to a multiple of 16 bytes (see parts_of)
  void* row_scale = nullptr;  // 4 bytes, if the encoding has a row scale
};

struct Kernels {
  const char* name;  // "baseline", "avx2", "avx512"

  void (*copy)(void* out, const void* in, std::int64_t bytes, Store store);

  // Copies `in` to each of the `count` addresses in `outs`, reading it from memory only once.
  void (*copy_to_many)(void* const* outs, int count, const void* in, std::int64_t bytes, Store store);

  void (*zero)(void* out, std::int64_t bytes);

  void (*weighted_sum)(const RowSum& sum);

  // out = in, rounded to `out_type` if the types differ.
  void (*convert_row)(void* out, DType out_type, const void* in, DType in_type, std::int64_t columns,
                      Store store);

  // out = round(weight * in), both of `type`.
  void (*apply_weight)(void* out, const void* in, DType type, float weight, std::int64_t columns,
                       Store store);

  // The dot product, with its additions in exactly this order:
  //   acc[0..255] = +0; for c ascending: acc[c % 256] = fma(a[c], b[c], acc[c % 256])
  //   in every group of eight, acc[8g .. 8g+7]: acc[i] += acc[i + 4] (i < 4), then i + 2 (i < 2), then i + 1
  //   over the 32 group sums s[g] = acc[8g]: s[g] += s[g + 16] (g < 16), then + 8, + 4, + 2, + 1; the result
  //   is s[0]
  float (*dot)(const void* a, DType a_type, const void* b, DType b_type, std::int64_t columns);

  // Quantises a row. Requires encoding.quantises(); cached stores. `global_scale`: g of NVFP4, unless the
  // format has one for each row. Returns whether every scale could be formed: see format/blocks.hpp.
  bool (*encode_row)(const EncodedRow& to, const void* in, DType in_type, std::int64_t columns,
                     const Encoding& encoding, float global_scale);
};

// The fastest table that this processor can run.
const Kernels& kernels();

// Every table that this processor can run, slowest first. The first is always "baseline".
std::span<const Kernels* const> available_kernels();

// The tables of all instruction sets. Only kernels.cpp decides which of them this processor can run.
extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;    // x86-64 only
extern const Kernels kAvx512Kernels;  // x86-64 only

}  // namespace ferry::cpu
