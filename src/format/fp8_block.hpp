// The scale of a block of fp8 values: 128 columns of a row. The last block of a row may be shorter.
//
//   amax  = max |float(x)| over the block, NaN ignored (0 if nothing is left)
//   s     = max(amax, 1e-4f)
//
//   plain          scale = s / 448                     q = e4m3(x * (448 / s))
//   power of two   scale = 2^ceil(log2(s / 448))       q = e4m3(x * (1 / scale))
//
// Every operation is an IEEE fp32 operation, rounded once. s / 448 is rounded before the power of two at or
// above it is taken from its bits. 1 / scale is exact. An infinity in the block makes s and the scale
// infinite and the factor 0: then finite values become 0 with their sign, and infinities and NaN become 7F.
//
// Packed scales are the biased exponents of power-of-two scales: bits >> 23 of the scale, 255 for infinity.
// The exponent of block b is byte b % 4 of the little-endian int32 b / 4. Bytes past the last block are 0.
#pragma once

#include <cstdint>

#include "format/e4m3.hpp"
#include "format/encoding.hpp"
#include "format/scale.hpp"

namespace ferry {

inline constexpr int kFp8Block = 128;

// The smallest power of two that is at least `value`, which is a positive normal number or infinity.
FERRY_HD constexpr float power_of_two_at_least(float value) {
  const std::uint32_t fraction = bits_of(value) & 0x007FFFFFu;
  const std::uint32_t exponent = bits_of(value) & 0x7F800000u;
  return float_of(fraction == 0 ? exponent : exponent + 0x00800000u);
}

// `amax` must not be NaN.
FERRY_HD constexpr BlockScale fp8_scale(float amax, ScaleRule rule) {
  const float s = amax > 1e-4f ? amax : 1e-4f;
  if (rule == ScaleRule::quotient) return {s / kE4m3Max, kE4m3Max / s};
  const float scale = power_of_two_at_least(s / kE4m3Max);
  return {scale, 1.0f / scale};
}

}  // namespace ferry
