// e4m3: 4 bits of exponent, 3 bits of fraction, no infinity, and one NaN of each sign. The largest value is
// 448.
#pragma once

#include <cstdint>

#include "format/fp32.hpp"

namespace ferry {

inline constexpr std::uint8_t kE4m3Nan = 0x7F;
inline constexpr float kE4m3Lowest = 0x1p-6f;  // smallest normal value
inline constexpr float kE4m3Max = 448.0f;

FERRY_HD constexpr float e4m3_to_fp32(std::uint8_t bits) {
  const std::uint32_t magnitude = bits & 0x7Fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  const std::uint32_t normal = (magnitude << 20) + (120u << 23);  // exponent bias 7 -> 127
  const std::uint32_t denormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
  const std::uint32_t finite = magnitude < 0x08u ? denormal : normal;
  return float_of(magnitude == kE4m3Nan ? kFp32Nan : (sign | finite));
}

// Rounds to nearest, ties to even. Infinities and values above 448 become 448 with their sign; NaN becomes
// 7F.
FERRY_HD constexpr std::uint8_t fp32_to_e4m3(float value) {
  const std::int32_t magnitude = smaller(magnitude_of(value), magnitude_of(kE4m3Max));
  const std::uint32_t nan = mask_nan(bits_of(value));
  const std::uint32_t sign = bits_of(value) & kFp32Sign & ~nan;
  // smaller() has turned a NaN into 448, which is 7E: the last bit set and the sign cleared make it 7F.
  const std::uint32_t bits = narrow_magnitude(magnitude, 3, kE4m3Lowest) | (nan & 1);
  return static_cast<std::uint8_t>((sign | bits << 24) >> 24);
}

}  // namespace ferry
