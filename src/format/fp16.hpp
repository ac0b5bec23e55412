// fp16: 5 bits of exponent, 10 bits of fraction.
#pragma once

#include <cstdint>

#include "format/fp32.hpp"

namespace ferry {

inline constexpr std::int32_t kFp16Infinity = 0x7C00;
inline constexpr float kFp16Lowest = 0x1p-14f;  // smallest normal value
inline constexpr float kFp16Over = 65520.0f;    // the smallest value that rounds to infinity

// The exact value, as an operand of arithmetic. A NaN keeps its payload; canonical() removes it from the
// result.
FERRY_HD constexpr float fp16_value(std::uint16_t bits) {
  const std::int32_t magnitude = bits & 0x7FFF;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::int32_t denormal = ~mask_above(magnitude, 0x03FF);
  const std::int32_t special = mask_above(magnitude, kFp16Infinity - 1);
  // The exponent bias changes from 15 to 127, and exponent 31 becomes 255. A denormal is read as if it had
  // the leading one of a normal value, which is then subtracted. This avoids denormal arithmetic, which a
  // processor may flush to zero.
  const std::int32_t exponents = (112 << 23) + (special & (112 << 23)) + (denormal & (1 << 23));
  const float value =
      float_of((magnitude << 13) + exponents) - float_of(denormal & magnitude_of(kFp16Lowest));
  return float_of(sign | bits_of(value));
}

FERRY_HD constexpr float fp16_to_fp32(std::uint16_t bits) {
  return canonical(fp16_value(bits));
}

FERRY_HD constexpr std::uint16_t fp32_to_fp16(float value) {
  const std::int32_t magnitude = smaller(magnitude_of(value), magnitude_of(kFp16Over));
  const std::uint32_t nan = mask_nan(bits_of(value));
  const std::uint32_t sign = bits_of(value) & kFp32Sign & ~nan;
  // smaller() has turned a NaN into infinity: all fraction bits set and the sign cleared make it 7FFF.
  const std::uint32_t bits = narrow_magnitude(magnitude, 10, kFp16Lowest) | (nan & 0x03FFu);
  return static_cast<std::uint16_t>((sign | bits << 16) >> 16);
}

}  // namespace ferry
