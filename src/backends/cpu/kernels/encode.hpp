// Quantisation of a row in blocks of columns, each with a scale.
#pragma once

#include "backends/cpu/kernels/kernels.hpp"
#include "backends/cpu/kernels/rows.hpp"
#include "format/blocks.hpp"
#include "format/numbers.hpp"

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

struct E4m3 {
  static constexpr int kBits = 8;

  template <class In>
  static void quantise(char* __restrict out, const char* __restrict in, float factor, std::int64_t columns) {
    for (std::int64_t c = 0; c < columns; ++c) {
      out[c] = static_cast<char>(fp32_to_e4m3(In::value(load<In>(in, c)) * factor));
    }
  }
};

struct E2m1 {
  static constexpr int kBits = 4;

  template <class In>
  static void quantise(char* __restrict out, const char* __restrict in, float factor, std::int64_t columns) {
    for (std::int64_t c = 0; c < columns; c += 2) {
      const std::uint8_t even = fp32_to_e2m1(In::value(load<In>(in, c)) * factor);
      const std::uint8_t odd = fp32_to_e2m1(In::value(load<In>(in, c + 1)) * factor);
      out[c / 2] = static_cast<char>(even | odd << 4);
    }
  }
};

struct Fp8Blocks {
  using Element = E4m3;
  static constexpr int kColumns = kFp8Block;
  static BlockScale scale(float amax, ScaleRule rule) { return fp8_scale(amax, rule); }
};

struct Mxfp8Blocks {
  using Element = E4m3;
  static constexpr int kColumns = kMxBlock;
  static BlockScale scale(float amax, ScaleRule rule) { return mx_scale(amax, rule, ElementType::e4m3); }
};

struct Mxfp4Blocks {
  using Element = E2m1;
  static constexpr int kColumns = kMxBlock;
  static BlockScale scale(float amax, ScaleRule rule) { return mx_scale(amax, rule, ElementType::e2m1); }
};

template <class In, class Blocks>
BlockScale encode_block(char* out, const char* in, std::int64_t columns, ScaleRule rule) {
  const BlockScale scale = Blocks::scale(block_amax<In>(in, columns), rule);
  Blocks::Element::template quantise<In>(out, in, scale.factor, columns);
  return scale;
}

FERRY_HD void store_scale(char* scales, std::int64_t block, float scale, bool packed) {
  if (packed) {
    scales[block] = static_cast<char>(biased_exponent(scale));
  } else {
    store<Fp32>(scales, block, bits_of(scale));
  }
}

template <class In, class Blocks>
void encode_as(char* values, char* scales, const char* in, std::int64_t columns, const Encoding& encoding) {
  constexpr std::int64_t kBytes = sizeof(typename In::Bits);
  const std::int64_t blocks = (columns + Blocks::kColumns - 1) / Blocks::kColumns;
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t first = block * Blocks::kColumns;
    char* const out = values + first * Blocks::Element::kBits / 8;
    const char* const from = in + first * kBytes;
    // Full blocks have a constant number of columns, so that the compiler emits loops without remainders.
    const BlockScale scale = columns - first >= Blocks::kColumns
                                 ? encode_block<In, Blocks>(out, from, Blocks::kColumns, encoding.rule)
                                 : encode_block<In, Blocks>(out, from, columns - first, encoding.rule);
    store_scale(scales, block, scale.scale, encoding.packs_scales());
  }
  const std::int64_t used = blocks * (encoding.packs_scales() ? 1 : 4);
  const std::int64_t padding = (16 - used % 16) % 16;
  __builtin_memset(scales + used, 0, static_cast<std::size_t>(padding));
}

template <class In>
float largest_finite(const char* __restrict in, std::int64_t columns) {
  float largest = 0;
  for (std::int64_t c = 0; c < columns; ++c) {
    const float magnitude = In::value_of_magnitude(In::magnitude(load<In>(in, c)));
    const float finite = magnitude <= kLargestFinite ? magnitude : 0.0f;
    largest = finite > largest ? finite : largest;
  }
  return largest;
}

template <class In>
bool encode_nvfp4(char* values, char* scales, const char* in, std::int64_t columns, float global_scale) {
  constexpr std::int64_t kBytes = sizeof(typename In::Bits);
  const std::int64_t blocks = (columns + kNvfp4Block - 1) / kNvfp4Block;
  bool valid = true;
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t first = block * kNvfp4Block, left = columns - first;
    const char* const from = in + first * kBytes;
    const std::int64_t count = left < kNvfp4Block ? left : kNvfp4Block;
    const Nvfp4Scale scale = nvfp4_scale(block_amax<In>(from, count), global_scale);
    valid = valid && scale.valid();
    scales[block] = static_cast<char>(scale.stored);
    char* const out = values + first / 2;
    for (std::int64_t c = 0; c < count; c += 2) {
      const std::uint8_t even = scale.code(In::value(load<In>(from, c)));
      const std::uint8_t odd = scale.code(In::value(load<In>(from, c + 1)));
      out[c / 2] = static_cast<char>(even | odd << 4);
    }
  }
  const std::int64_t padding = (16 - blocks % 16) % 16;
  __builtin_memset(scales + blocks, 0, static_cast<std::size_t>(padding));
  return valid;
}

template <class In>
bool encode_row_of(const EncodedRow& to, const char* in, std::int64_t columns, const Encoding& encoding,
                   float global_scale) {
  auto* const values = static_cast<char*>(to.values);
  auto* const scales = static_cast<char*>(to.scales);
  const auto encode = [&](auto blocks) {
    encode_as<In, decltype(blocks)>(values, scales, in, columns, encoding);
    return true;
  };
  if (encoding.is_two_level()) {
    if (encoding.row_scale) {
      global_scale = nvfp4_row_scale(largest_finite<In>(in, columns));
      __builtin_memcpy(to.row_scale, &global_scale, sizeof global_scale);
    }
    return encode_nvfp4<In>(values, scales, in, columns, global_scale);
  }
  if (!encoding.is_mx()) return encode(Fp8Blocks{});
  return encoding.element == ElementType::e4m3 ? encode(Mxfp8Blocks{}) : encode(Mxfp4Blocks{});
}

bool encode_row(const EncodedRow& to, const void* in, DType in_type, std::int64_t columns,
                const Encoding& encoding, float global_scale) {
  bool valid = true;
  with_type(in_type, [&](auto type) {
    valid = encode_row_of<decltype(type)>(to, static_cast<const char*>(in), columns, encoding, global_scale);
  });
  return valid;
}

}  // namespace
}  // namespace ferry::cpu
