// fp16: 5 bits of exponent, 10 of fraction.
#pragma once

#include <cstdint>

#include "format/fp32.hpp"

namespace ferry {

inline constexpr std::uint16_t kFp16Nan = 0x7FFF;
inline constexpr std::uint32_t kFp16Infinity = 0x7C00;

// The value as an operand of arithmetic: exact; a NaN keeps its payload, which canonical() removes from the
// result.
FERRY_HD constexpr float fp16_value(std::uint16_t bits) {
  const std::uint32_t magnitude = bits & 0x7FFFu;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);  // exponent bias 15 -> 127
  const std::uint32_t special = magnitude << 13 | kFp32Infinity;
  // A denormal is its bits times 2^-24, a normal fp32: no denormal arithmetic, which a processor may flush.
  const std::uint32_t denormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t finite = magnitude < 0x0400u ? denormal : normal;
  return float_of(sign | (magnitude >= kFp16Infinity ? special : finite));
}

FERRY_HD constexpr float fp16_to_fp32(std::uint16_t bits) {
  return canonical(fp16_value(bits));
}

FERRY_HD constexpr std::uint16_t fp32_to_fp16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & ~kFp32Sign;
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1)) >> 13;
  // Adding 0.5, whose last place is the smallest fp16 denormal, rounds to multiples of that denormal.
  const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const std::uint32_t rounded = magnitude < bits_of(0x1p-14f) ? denormal : normal;
  const std::uint32_t finite = magnitude < bits_of(65520.0f) ? rounded : kFp16Infinity;
  return static_cast<std::uint16_t>(is_nan_bits(bits) ? kFp16Nan : (sign | finite));
}

}  // namespace ferry
