// Stores received rows: copies of a message's parts, and rows computed from them.
#pragma once

#include "backends/cuda/dispatch/dispatch_traits.cuh"
#include "backends/cuda/dispatch/routing.cuh"
#include "backends/cuda/dispatch/send_encoded.cuh"
#include "format/blocks.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// [warp] Adds up 32 threads' sums of 8 columns each, in the order that docs/formats.md gives for a dot
// product. The first thread has the result.
__device__ inline float dot_of_sums(float (&sum)[8]) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) sum[i] = __fadd_rn(sum[i], sum[i + step]);
  }
  float dot = sum[0];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) dot = __fadd_rn(dot, __shfl_down_sync(~0u, dot, step));
  return canonical(dot);
}

// [warp] Stores `row` times its weight in received row `to`, and its dot product with the caller's row there.
static __device__ __noinline__ void compute_row(const DispatchArguments& call, const std::byte* row,
                                                std::int32_t to, float weight) {
  const int thread = threadIdx.x % 32;
  const std::int64_t hidden = call.lane.hidden;
  std::byte* out = call.received_parts[0] + to * call.parts.part[0].row_bytes;
  const std::byte* other = nullptr;
  if (call.dot_rows != nullptr)
    other = static_cast<const std::byte*>(call.dot_rows) + to * hidden * value_bytes(call.dot_type);
  float sum[8] = {};
  for (std::int64_t column = 8 * thread; column < hidden; column += 256) {
#pragma unroll
    for (int four = 0; four < 8; four += 4) {
      if (column + four >= hidden) break;
      float x[4], v[4], weighted[4];
      load_four(call.type, row, column + four, x);
      if (call.apply_weights) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weighted[i] = __fmul_rn(weight, x[i]);
        store_values(call.type, out, column + four, weighted);
      }
      if (other == nullptr) continue;
      load_four(call.dot_type, other, column + four, v);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[four + i] = __fmaf_rn(x[i], v[i], sum[four + i]);
    }
  }
  if (other == nullptr) return;
  const float dot = dot_of_sums(sum);
  if (thread == 0) call.dots[to] = dot;
}

// Encodes a received row with the scale of its expert (DispatchOptions::input_scales), column by column and
// with the arithmetic of src/format: eight columns by one thread. Blocks are completed with its neighbours.
struct EncodedEight {
  std::uint64_t codes;  // the first column in the lowest bits; e2m1: in the lower half
  std::uint8_t scale;   // of the block that holds these columns
  bool valid;           // two levels: the scale could be formed
};

// [warp] `x`: zeros past the end of the row. fp8 has no scales of blocks.
__device__ __forceinline__ EncodedEight encode_eight_with_scale(float (&x)[8], const Encoding& encoding,
                                                                float scale) {
  EncodedEight encoded{0, 0, true};
  float largest = 0;  // NaN ignored
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!encoding.is_two_level()) x[i] = x[i] / scale;
    largest = fmaxf(largest, fabsf(x[i]));
  }
  if (encoding.is_microscaled()) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  if (encoding.is_two_level()) {
    const Nvfp4Scale of_block = nvfp4_scale(largest, scale);
    encoded.scale = of_block.stored;
    encoded.valid = of_block.valid();
#pragma unroll
    for (int i = 0; i < 8; ++i) encoded.codes |= std::uint64_t{of_block.code(x[i])} << (4 * i);
    return encoded;
  }
  float factor = 1;
  if (encoding.is_mx()) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const BlockScale of_block = mx_scale(largest, encoding.rule, encoding.element);
    encoded.scale = biased_exponent(of_block.scale);
    factor = of_block.factor;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) encoded.codes |= std::uint64_t{fp32_to_e4m3(x[i] * factor)} << (8 * i);
  return encoded;
}

// [warp] Encodes the token's row at `row`, of call.type, and stores it as received row `to`.
static __device__ __noinline__ void encode_with_scale(const DispatchArguments& call, const std::byte* row,
                                                      std::int64_t to, float scale) {
  const Encoding& encoding = call.row_encoding;
  const PartLayout& scales = call.received.part[1];
  const int thread = static_cast<int>(threadIdx.x % 32), hidden = call.lane.hidden,
            of_block = encoding.block / 8;  // threads
  const bool narrow = encoding.element == ElementType::e2m1, has_scales = call.received.count > 1;
  std::byte* const values = call.received_parts[0] + to * call.received.part[0].row_bytes;
  const std::int64_t scale_row = column_row(scales, to, call.group_rows, call.leading_dimension[1]);
  bool valid = scale > 0 && scale <= kLargestFinite;
#pragma unroll 1
  for (int first = 0; first < hidden; first += 256) {
    const int column = first + 8 * thread;
    const bool has = column < hidden;
    float x[8] = {};
    if (has) unpack(call.type, load_eight(call.type, row, column), x);
    const EncodedEight eight = encode_eight_with_scale(x, encoding, scale);
    valid = valid && (eight.valid || !has);
    if (has) {
      if (narrow) {
        *reinterpret_cast<std::uint32_t*>(values + column / 2) = static_cast<std::uint32_t>(eight.codes);
      } else {
        *reinterpret_cast<uint2*>(values + column) = make_uint2(
            static_cast<std::uint32_t>(eight.codes), static_cast<std::uint32_t>(eight.codes >> 32));
      }
    }
    if (!has_scales) continue;
    // A word holds the scales of four blocks; the first thread of the first block stores it.
    std::uint32_t word = has ? std::uint32_t{eight.scale} << (8 * (thread / of_block % 4)) : 0;
    word |= __shfl_xor_sync(~0u, word, of_block);
    word |= __shfl_xor_sync(~0u, word, 2 * of_block);
    if (!has || thread % (4 * of_block) != 0) continue;
    const std::int64_t offset = column / (8 * of_block), element = offset / scales.element_bytes;
    std::byte* const at = call.received_parts[1] +
                          element_offset(scales, scale_row, element, call.leading_dimension[1]) +
                          offset % scales.element_bytes;
    *reinterpret_cast<std::uint32_t*>(at) = word;
  }
  if (!valid) atomicAdd(&call.lane.state->diagnostics.bad_scales, 1ull);
}

// Whether a part is copied in accesses of 16 bytes.
__device__ __forceinline__ bool moves_whole(const PartLayout& part) {
  return !part.columns && part.row_bytes % 16 == 0;
}

// The bytes of part `p` that belong to some quarters of a row. The sender cuts the part in the same way, and
// a quarter's flag covers exactly these bytes.
template <class Traits>
__device__ __forceinline__ ByteRange bytes_of_part(const DispatchArguments& call, int p,
                                                   const Quarters& quarters) {
  const auto bytes = static_cast<int>(call.parts.part[p].row_bytes);
  if (!Traits::quantises(call)) return ByteRange::of(quarters, bytes, kGranule);
  const ByteRange columns = encoded_columns(call.lane, quarters);
  if (Traits::microscaled(call)) {
    if (p == 2) return {quarters.last == kQuarters ? 0 : bytes, bytes};  // the scale of the whole row
    // A quarter may end with the row, whose last word of scales may be partly used.
    const int block = Traits::two_level(call) ? kNvfp4Block : kMxBlock;
    const auto at = [&](int column) {
      const int of_scales = (column / block + (column % block != 0) + 3) / 4 * 4;
      return p == 0 ? static_cast<int>(call.encoding.value_bytes(column)) : of_scales;
    };
    return {at(columns.begin), quarters.last == kQuarters ? bytes : at(columns.end)};
  }
  if (p == 0) return columns;
  const auto scales = [&](int column) {
    const int blocks = (column + kFp8Block - 1) / kFp8Block;
    return min(call.encoding.packs_scales() ? (blocks + 3) / 4 * 4 : 4 * blocks, bytes);
  };
  return {scales(columns.begin), quarters.last == kQuarters ? bytes : scales(columns.end)};
}

// [warp] Copies some quarters of a part from `from` to the row of each thread in `threads` (one bit each);
// `row`: this thread's.
template <class Traits>
__device__ __forceinline__ void store_part(const DispatchArguments& call, int p, const std::byte* from,
                                           std::int32_t row, std::uint32_t threads,
                                           const Quarters& quarters) {
  const PartLayout& part = call.parts.part[p];
  const ByteRange range = bytes_of_part<Traits>(call, p, quarters);
  // Parts that are not quantised come in multiples of 16 bytes.
  if (!Traits::quantises(call) || (moves_whole(part) && (range.begin | range.end) % 16 == 0)) {
    const auto bytes = static_cast<std::int32_t>(part.row_bytes);
    copy_granules<Traits::kGranulesAtOnce>(from, range, [&](const auto& granules, int at) {
#pragma unroll 1
      for (std::uint32_t left = threads; left != 0; left &= left - 1) {
        const std::int32_t to = __shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1);
        granules.store(call.received_parts[p] + std::int64_t{to} * bytes, at, range.end);
      }
    });
    return;
  }
  // Scales: single words, in a column or in rows that are no multiple of 16 bytes.
#pragma unroll 1
  for (std::uint32_t left = threads; left != 0; left &= left - 1) {
    const std::int32_t received = __shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1);
    const std::int64_t to = column_row(part, received, call.group_rows, call.leading_dimension[p]);
    std::byte* const first =
        call.received_parts[p] + to * (part.columns ? kScaleBytes : static_cast<int>(part.row_bytes));
    const std::int64_t step = part.columns ? kScaleBytes * call.leading_dimension[p] : kScaleBytes;
#pragma unroll 1
    for (int byte = range.begin + 4 * static_cast<int>(threadIdx.x % 32); byte < range.end; byte += 128) {
      *reinterpret_cast<std::uint32_t*>(first + byte / kScaleBytes * step) =
          *reinterpret_cast<const std::uint32_t*>(from + byte);
    }
  }
}

// Rows to copy, for a stream: one row for each tile in `tiles` (one bit each), at the tile's `row`.
struct CopiedRows {
  TokenTile tile;
  std::uint32_t tiles;
  const std::byte* row;
  int bytes;

  __device__ __forceinline__ bool open(const std::byte** next, ByteRange* range) {
    if (tiles == 0) return false;
    const int from = (__ffs(static_cast<int>(tiles)) - 1) << tile.log2_size;
    tiles &= tiles - 1;
    *next = pointer_of(row, from);
    *range = {0, bytes};
    return true;
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
