// The formulas of docs/formats.md for fp8, mxfp8, mxfp4 and nvfp4, in double, for host and device. They
// include nothing of src/.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define FORMULA __host__ __device__ inline
#else
#define FORMULA inline
#endif

namespace ferry::contract {

FORMULA std::uint32_t fp32_bits(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}

FORMULA float fp32_of(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

// 2^exponent, for the exponents of normal doubles.
FORMULA double two_to_the(int exponent) {
  return __builtin_bit_cast(double, static_cast<std::uint64_t>(exponent + 1023) << 52);
}

// floor(log2(value)) of a positive normal double.
FORMULA int log2_of(double value) {
  return static_cast<int>(__builtin_bit_cast(std::uint64_t, value) >> 52) - 1023;
}

FORMULA double value_of_e4m3(int code) {
  return code < 8 ? code * two_to_the(-9) : (8 + code % 8) * two_to_the(code / 8 - 10);
}

// Rounded to nearest, ties to even; saturates.
FORMULA std::uint8_t e4m3_of(float value) {
  if (value != value) return 0x7F;
  const auto sign = static_cast<std::uint8_t>(fp32_bits(value) >> 31 << 7);
  const double magnitude = value < 0 ? -static_cast<double>(value) : value;
  if (magnitude >= 448) return sign | 0x7E;
  const int exponent = magnitude < two_to_the(-6) ? -6 : log2_of(magnitude);
  // In units of the last place, 8 to 16 for normal numbers: a carry into the exponent adds up by itself.
  const auto units = static_cast<int>(rint(magnitude * two_to_the(3 - exponent)));
  return static_cast<std::uint8_t>(sign | (8 * (exponent + 6) + units));
}

// Rounded to nearest, ties to even; saturates.
FORMULA std::uint8_t e2m1_of(double value) {
  if (value != value) return 7;
  const double magnitude = value < 0 ? -value : value;
  const int code = (magnitude > 0.25) + (magnitude >= 0.75) + (magnitude > 1.25) + (magnitude >= 1.75) +
                   (magnitude > 2.5) + (magnitude >= 3.5) + (magnitude > 5);
  const auto sign = static_cast<int>(__builtin_bit_cast(std::uint64_t, value) >> 63 << 3);
  return static_cast<std::uint8_t>(sign | code);
}

// The formulas have what the tests compare of a block: the stored scale and the codes.

// Rounding the double to fp32 gives what an fp32 product or quotient of fp32 numbers is.
struct Fp8Formula {
  float scale, factor;
  bool packed;  // stores the exponent

  FORMULA static Fp8Formula of(float amax, bool power_of_two, bool packed) {
    const double s = amax > 1e-4f ? amax : 1e-4f;
    const auto ratio = static_cast<float>(s / 448.0);
    if (!power_of_two) return {ratio, static_cast<float>(448.0 / s), packed};
    if (fp32_bits(ratio) == 0x7F800000u) return {ratio, 0.0f, packed};
    const double below = two_to_the(log2_of(ratio)), scale = below < ratio ? 2 * below : below;
    return {static_cast<float>(scale), static_cast<float>(1 / scale), packed};
  }
  FORMULA std::uint32_t stored() const { return packed ? fp32_bits(scale) >> 23 : fp32_bits(scale); }
  FORMULA std::uint8_t code(float value) const {
    return e4m3_of(static_cast<float>(static_cast<double>(value) * factor));
  }
};

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
