// bf16: the upper half of an fp32.
#pragma once

#include <cstdint>

#include "format/fp32.hpp"

namespace ferry {

inline constexpr std::uint16_t kBf16Nan = 0x7FFF;

// The value as an operand of arithmetic: exact; a NaN keeps its payload, which canonical() removes from the
// result.
FERRY_HD constexpr float bf16_value(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

FERRY_HD constexpr float bf16_to_fp32(std::uint16_t bits) {
  return canonical(bf16_value(bits));
}

FERRY_HD constexpr std::uint16_t fp32_to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded =
      (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;  // carries into infinity as it should
  return static_cast<std::uint16_t>(is_nan_bits(bits) ? kBf16Nan : rounded);
}

}  // namespace ferry
