// bf16: the upper 16 bits of an fp32.
#pragma once

#include <cstdint>

#include "format/fp32.hpp"

namespace ferry {

// The exact value, as an operand of arithmetic. A NaN keeps its payload; canonical() removes it from the
// result.
FERRY_HD constexpr float bf16_value(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

FERRY_HD constexpr float bf16_to_fp32(std::uint16_t bits) {
  return canonical(bf16_value(bits));
}

// The rounded value in the upper 16 bits; the lower 16 bits hold anything.
FERRY_HD constexpr std::uint32_t fp32_to_bf16_above(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded =
      bits + 0x7FFFu + (bits >> 16 & 1);  // may carry into infinity, which is correct
  return magnitude_of(bits) > kFp32Infinity ? kFp32Nan : rounded;
}

FERRY_HD constexpr std::uint16_t fp32_to_bf16(float value) {
  return static_cast<std::uint16_t>(fp32_to_bf16_above(value) >> 16);
}

}  // namespace ferry
