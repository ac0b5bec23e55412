// Encodes a received row with the scale of its expert (DispatchOptions::input_scales), column by column and
// with the arithmetic of src/format. Not inlined: calls without input_scales do not fetch it.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "format/blocks.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// Eight columns of a row, encoded by one thread. Blocks are completed with its neighbours.
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

}  // namespace ferry::cuda::inline FERRY_WIDTH
