// e4m3: 4 bits of exponent, 3 of fraction, no infinity, one NaN (and its negative). The largest value is 448.
#pragma once

#include <cstdint>

#include "format/fp32.hpp"

namespace ferry {

inline constexpr std::uint8_t kE4m3Nan = 0x7F;
inline constexpr std::uint32_t kE4m3Largest = 0x7E;
inline constexpr float kE4m3Max = 448.0f;

FERRY_HD constexpr float e4m3_to_fp32(std::uint8_t bits) {
  const std::uint32_t magnitude = bits & 0x7Fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t normal = (magnitude << 20) + (120u << 23);  // exponent bias 7 -> 127
  const std::uint32_t denormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
  const std::uint32_t finite = magnitude < 0x08u ? denormal : normal;
  return float_of(magnitude == kE4m3Nan ? kFp32Nan : (sign | finite));
}

// To nearest, ties to even; infinities and what is too large become the largest value, NaN becomes 7F.
FERRY_HD constexpr std::uint8_t fp32_to_e4m3(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & ~kFp32Sign;
  const std::uint32_t sign = bits >> 24 & 0x80u;
  const std::uint32_t normal = (magnitude - (120u << 23) + 0x7FFFFu + (magnitude >> 20 & 1)) >> 20;
  // Adding 2^14, whose last place is the smallest e4m3 denormal, rounds to multiples of that denormal.
  const std::uint32_t denormal = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);
  const std::uint32_t rounded = magnitude < bits_of(0x1p-6f) ? denormal : normal;
  const std::uint32_t finite = magnitude < bits_of(kE4m3Max) ? rounded : kE4m3Largest;
  return static_cast<std::uint8_t>(magnitude > kFp32Infinity ? kE4m3Nan : (sign | finite));
}

}  // namespace ferry
