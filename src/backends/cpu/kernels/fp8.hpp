// Quantisation of a row to e4m3 with one scale for each block of 128 columns.
#pragma once

#include "backends/cpu/kernels/values.hpp"
#include "format/fp8_block.hpp"

namespace ferry::cpu {
namespace {

template <class In>
float block_amax(const char* __restrict in, std::int64_t columns) {
  decltype(In::magnitude(0)) largest = 0;
  for (std::int64_t c = 0; c < columns; ++c) {
    const auto magnitude = In::magnitude(load<In>(in, c));
    largest = magnitude > largest ? magnitude : largest;
  }
  return In::value_of_magnitude(largest);
}

template <class In>
void quantise_block(char* __restrict out, const char* __restrict in, float factor, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; ++c) {
    out[c] = static_cast<char>(fp32_to_e4m3(In::value(load<In>(in, c)) * factor));
  }
}

template <class In>
Fp8Scale encode_block(char* out, const char* in, std::int64_t columns, ScaleRule rule) {
  const Fp8Scale scale = fp8_scale(block_amax<In>(in, columns), rule);
  quantise_block<In>(out, in, scale.factor, columns);
  return scale;
}

FERRY_HD void store_scale(char* scales, std::int64_t block, float scale, bool packed) {
  if (packed) {
    scales[block] = static_cast<char>(packed_scale(scale));
  } else {
    store<Fp32>(scales, block, bits_of(scale));
  }
}

template <class In>
void encode_as(char* values, char* scales, const char* in, std::int64_t columns, const Encoding& encoding) {
  constexpr std::int64_t kBytes = sizeof(typename In::Bits);
  const std::int64_t blocks = fp8_blocks(columns);
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t first = block * kFp8Block;
    // Full blocks have a constant number of columns, so that the compiler emits loops without remainders.
    const Fp8Scale scale =
        columns - first >= kFp8Block
            ? encode_block<In>(values + first, in + first * kBytes, kFp8Block, encoding.rule)
            : encode_block<In>(values + first, in + first * kBytes, columns - first, encoding.rule);
    store_scale(scales, block, scale.scale, encoding.packs_scales());
  }
  const std::int64_t used = blocks * (encoding.packs_scales() ? 1 : 4);
  const std::int64_t padding = (16 - used % 16) % 16;
  __builtin_memset(scales + used, 0, static_cast<std::size_t>(padding));
}

void encode_row(void* values, void* scales, const void* in, DType in_type, std::int64_t columns,
                const Encoding& encoding) {
  with_type(in_type, [&](auto type) {
    encode_as<decltype(type)>(static_cast<char*>(values), static_cast<char*>(scales),
                              static_cast<const char*>(in), columns, encoding);
  });
}

}  // namespace
}  // namespace ferry::cpu
