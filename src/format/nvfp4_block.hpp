// The scale of a block of NVFP4: 16 columns of a row. The last block of a row may be shorter.
//
//   amax = max |float(x)| over the block, NaN ignored (0 if nothing is left)
//   t    = (amax / 6) / g        s = e4m3(t), which is stored        d = float(s) * g
//   q    = e2m1(x / d), or 0 where d is 0
//
// Every operation is an IEEE fp32 operation, rounded once. Where g is not positive and finite, or d is not
// finite, s is 7F and every q is 0. Per token, g = max(amax of the row's finite values / 2688, 2^-126).
#pragma once

#include <cstdint>

#include "format/e2m1.hpp"
#include "format/e4m3.hpp"
#include "format/encoding.hpp"
#include "format/fp32.hpp"

namespace ferry {

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
