// The scales of blocks of quantised values, and the values: fp8, MX, NVFP4.
#pragma once

#include <cstdint>

#include "format/encoding.hpp"
#include "format/numbers.hpp"

namespace ferry {

struct BlockScale {
  float scale;   // what is stored: value = scale * q
  float factor;  // what values are multiplied by before they are rounded to the element type
};

// A power of two from 2^-127 to 2^127, or infinity, as its biased exponent.
FERRY_HD constexpr std::uint8_t biased_exponent(float scale) {
  return static_cast<std::uint8_t>(bits_of(scale) >> 23);
}

// The power of two with a biased exponent below 255; infinity for 255.
FERRY_HD constexpr float scale_of_exponent(std::uint32_t biased) {
  return biased == 0 ? float_of(0x00400000u) : float_of(biased << 23);
}

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

// The scale of a block of the MX formats: 32 columns of a row. The last block of a row may be shorter.
//
//   amax = max |float(x)| over the block, NaN ignored (0 if nothing is left) = m * 2^k, 1 <= m < 2
//
//            rule up                                rule ocp
//   mxfp8    e = k - 8, or k - 7 if m > 1.75        e = k - 8        q = e4m3(x * 2^-e)
//   mxfp4    e = k - 2, or k - 1 if m > 1.5         e = k - 2        q = e2m1(x * 2^-e)
//
// e is clamped to [-127, 127]; amax = 0 gives e = -127, an infinity 127. The scale is stored as e + 127.

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

// The scale of a block of NVFP4: 16 columns of a row. The last block of a row may be shorter.
//
//   amax = max |float(x)| over the block, NaN ignored (0 if nothing is left)
//   t    = (amax / 6) / g        s = e4m3(t), which is stored        d = float(s) * g
//   q    = e2m1(x / d), or 0 where d is 0
//
// Every operation is an IEEE fp32 operation, rounded once. Where g is not positive and finite, or d is not
// finite, s is 7F and every q is 0. Per token, g = max(amax of the row's finite values / 2688, 2^-126).

inline constexpr int kNvfp4Block = 16;
inline constexpr float kLargestFinite = 0x1.FFFFFEp127f;
inline constexpr float kNvfp4Range = 2688.0f;  // 6 * 448: the largest element times the largest scale

struct Nvfp4Scale {
  std::uint8_t stored;
  float divisor;  // 0: every code is 0

  FERRY_HD constexpr bool valid() const { return stored != kE4m3Nan; }
  FERRY_HD constexpr std::uint8_t code(float x) const {
    return divisor == 0 ? std::uint8_t{0} : fp32_to_e2m1(x / divisor);
  }
};

// `amax` must not be NaN.
FERRY_HD constexpr Nvfp4Scale nvfp4_scale(float amax, float g) {
  if (!(g > 0 && g <= kLargestFinite)) return {kE4m3Nan, 0.0f};
  const std::uint8_t scale = fp32_to_e4m3(amax / 6.0f / g);
  const float divisor = e4m3_to_fp32(scale) * g;
  return divisor <= kLargestFinite ? Nvfp4Scale{scale, divisor} : Nvfp4Scale{kE4m3Nan, 0.0f};
}

// g of a row whose largest finite magnitude is `amax`.
FERRY_HD constexpr float nvfp4_row_scale(float amax) {
  const float g = amax / kNvfp4Range;
  return g > 0x1p-126f ? g : 0x1p-126f;
}

}  // namespace ferry
