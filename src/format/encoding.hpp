// The facts of a format from which everything else follows: sizes of rows, messages and staging, and which
// encoder runs, on the host and in kernels.
#pragma once

#include <cstdint>
#include <optional>

#include "base/host_device.hpp"
#include "ferry/format.hpp"

namespace ferry {

// Type of a received value. `bytes`: Ferry does not look at it.
enum class ElementType : std::uint8_t { bf16, fp16, fp32, e4m3, bytes };

// How the scale of a block follows from its values; the formulas are in docs/contract.md, "Values".
// `none`: values are moved, not quantised.
enum class ScaleRule : std::uint8_t { none, quotient, power_of_two };

// How a scale is stored: as fp32, or as the biased exponent of a power of two, four to an int32.
enum class ScaleType : std::uint8_t { fp32, exponent };

struct Encoding {
  ElementType element = ElementType::bf16;
  ScaleRule rule = ScaleRule::none;
  ScaleType scale_type = ScaleType::fp32;
  bool scale_columns = false;  // scales are [blocks, leading dimension] instead of [rows, blocks]
  std::int16_t block = 0;      // columns of a row that share a scale; 0: no scales

  FERRY_HD constexpr bool quantises() const { return rule != ScaleRule::none; }
  FERRY_HD constexpr bool packs_scales() const { return scale_type == ScaleType::exponent; }
};

// Of a format that check_format() accepts.
Encoding encoding_of(const Format& format);

// Bits of one value; 0 for bytes, whose number the format gives.
constexpr int bits_of(ElementType element) {
  switch (element) {
    case ElementType::fp32:
      return 32;
    case ElementType::bf16:
    case ElementType::fp16:
      return 16;
    case ElementType::e4m3:
      return 8;
    case ElementType::bytes:
      break;
  }
  return 0;
}

// The type of the API that has the element's bits, if there is one.
constexpr std::optional<DType> dtype_of(ElementType element) {
  switch (element) {
    case ElementType::bf16:
      return DType::bf16;
    case ElementType::fp16:
      return DType::fp16;
    case ElementType::fp32:
      return DType::fp32;
    case ElementType::e4m3:
    case ElementType::bytes:
      break;
  }
  return std::nullopt;
}

}  // namespace ferry
