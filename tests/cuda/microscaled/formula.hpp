// The formulas of docs/formats.md for mxfp8, mxfp4 and nvfp4, in double, for host and device. They include
// nothing of src/.
#pragma once

#include "cuda/fp8/formula.hpp"

#ifdef __CUDACC__
#define FORMULA __host__ __device__ inline
#else
#define FORMULA inline
#endif

namespace ferry::contract {

// Rounded to nearest, ties to even; saturates.
FORMULA std::uint8_t e2m1_of(double value) {
  if (value != value) return 7;
  const double magnitude = value < 0 ? -value : value;
  const int code = (magnitude > 0.25) + (magnitude >= 0.75) + (magnitude > 1.25) + (magnitude >= 1.75) +
                   (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5);
  const auto sign = static_cast<int>(__builtin_bit_cast(std::uint64_t, value) >> 63 << 3);
  return static_cast<std::uint8_t>(sign | code);
}

// The parts of a block that the tests compare: its scale byte and its codes.
struct MxFormula {
  int exponent;
  bool narrow;  // e2m1, otherwise e4m3

  FORMULA static MxFormula of(float amax, bool narrow, bool up) {
    if (fp32_bits(amax) == 0x7F800000u) return {127, narrow};
    if (amax == 0) return {-127, narrow};
    const int k = log2_of(amax);
    const double m = amax * two_to_the(-k);
    const int exponent = k - (narrow ? 2 : 8) + (up && m > (narrow ? 1.5 : 1.75) ? 1 : 0);
    return {exponent < -127 ? -127 : exponent > 127 ? 127 : exponent, narrow};
  }
  FORMULA std::uint8_t stored() const { return static_cast<std::uint8_t>(exponent + 127); }
  FORMULA std::uint8_t code(float value) const {
    const double scaled = value * two_to_the(-exponent);
    if (narrow) return e2m1_of(scaled);
    // Within the range of fp32 the product is exact; beyond it e4m3 saturates, or is 0.
    return e4m3_of(static_cast<float>(scaled));
  }
};

// Rounding the double to fp32 gives what an fp32 product or quotient of fp32 numbers is.
struct Nvfp4Formula {
  std::uint8_t scale;
  float divisor;

  FORMULA static Nvfp4Formula of(float amax, float g) {
    if (!(g > 0) || fp32_bits(g) == 0x7F800000u) return {0x7F, 0};
    const auto sixth = static_cast<float>(amax / 6.0);
    const std::uint8_t scale = e4m3_of(static_cast<float>(sixth / static_cast<double>(g)));
    const auto divisor = static_cast<float>(value_of_e4m3(scale) * g);
    if (fp32_bits(divisor) == 0x7F800000u) return {0x7F, 0};
    return {scale, divisor};
  }
  FORMULA std::uint8_t stored() const { return scale; }
  FORMULA std::uint8_t code(float value) const {
    if (divisor == 0) return 0;
    return e2m1_of(static_cast<float>(value / static_cast<double>(divisor)));
  }
};

}  // namespace ferry::contract

#undef FORMULA
