// e2m1: 2 bits of exponent, 1 bit of fraction, no infinity and no NaN: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, each
// with either sign. Two values are stored in a byte, the even column in the low four bits.
#pragma once

#include <cstdint>

#include "format/fp32.hpp"

namespace ferry {

inline constexpr float kE2m1Lowest = 1.0f;  // smallest normal value
inline constexpr float kE2m1Max = 6.0f;

// The value of four bits.
FERRY_HD constexpr float e2m1_to_fp32(std::uint8_t bits) {
  const std::uint32_t magnitude = bits & 0x7u;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8u) << 28;
  const std::uint32_t normal = (magnitude << 22) + (126u << 23);  // exponent bias 1 -> 127
  const std::uint32_t denormal = magnitude == 0 ? 0 : bits_of(0.5f);
  return float_of(sign | (magnitude < 2 ? denormal : normal));
}

// Rounds to nearest, ties to even. Infinities and values above 6 become 6 with their sign; NaN becomes +6.
FERRY_HD constexpr std::uint8_t fp32_to_e2m1(float value) {
  const std::int32_t magnitude = smaller(magnitude_of(value), magnitude_of(kE2m1Max));
  const std::uint32_t sign = bits_of(value) & kFp32Sign & ~mask_nan(bits_of(value));
  // smaller() has turned a NaN into 6.
  return static_cast<std::uint8_t>((sign | narrow_magnitude(magnitude, 1, kE2m1Lowest) << 28) >> 28);
}

}  // namespace ferry
