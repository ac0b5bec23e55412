// The scale of a block of the MX formats: 32 columns of a row. The last block of a row may be shorter.
//
//   amax = max |float(x)| over the block, NaN ignored (0 if nothing is left) = m * 2^k, 1 <= m < 2
//
//            rule up                                rule ocp
//   mxfp8    e = k - 8, or k - 7 if m > 1.75        e = k - 8        q = e4m3(x * 2^-e)
//   mxfp4    e = k - 2, or k - 1 if m > 1.5         e = k - 2        q = e2m1(x * 2^-e)
//
// e is clamped to [-127, 127]; amax = 0 gives e = -127, an infinity 127. The scale is stored as e + 127.
#pragma once

#include <cstdint>

#include "format/encoding.hpp"
#include "format/fp32.hpp"
#include "format/scale.hpp"

namespace ferry {

inline constexpr int kMxBlock = 32;
inline constexpr int kMxLargestExponent = 127;

// 2^exponent, exactly; `exponent` in [-127, 127]. The smallest is a denormal number.
FERRY_HD constexpr float power_of_two(int exponent) {
  return exponent == -kMxLargestExponent ? float_of(0x00400000u)
                                         : float_of(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// `amax` must not be NaN.
FERRY_HD constexpr int mx_exponent(float amax, ScaleRule rule, ElementType element) {
  const std::uint32_t bits = bits_of(amax), fraction = bits & 0x007FFFFFu;
  if (magnitude_of(bits) >= kFp32Infinity) return kMxLargestExponent;
  const bool narrow = element == ElementType::e2m1;
  const std::uint32_t largest_fraction = narrow ? 0x400000u : 0x600000u;  // of 1.5 and 1.75
  const int raised = rule == ScaleRule::mx_up && fraction > largest_fraction ? 1 : 0;
  // A denormal amax has k < -126: its exponent is clamped in every format, whatever its fraction is.
  const int exponent = static_cast<int>(bits >> 23) - 127 - (narrow ? 2 : 8) + raised;
  return larger(exponent, -kMxLargestExponent);
}

FERRY_HD constexpr BlockScale mx_scale(float amax, ScaleRule rule, ElementType element) {
  const int exponent = mx_exponent(amax, rule, element);
  return {power_of_two(exponent), power_of_two(-exponent)};
}

}  // namespace ferry
