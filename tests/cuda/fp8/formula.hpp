// The formula of docs/formats.md for fp8, in double, for host and device. It includes nothing of src/.
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

// Rounding the double to fp32 gives what an fp32 product or quotient of fp32 numbers is.
struct Fp8Formula {
  float scale, factor;

  FORMULA static Fp8Formula of(float amax, bool power_of_two) {
    const double s = amax > 1e-4f ? amax : 1e-4f;
    const auto ratio = static_cast<float>(s / 448.0);
    if (!power_of_two) return {ratio, static_cast<float>(448.0 / s)};
    if (fp32_bits(ratio) == 0x7F800000u) return {ratio, 0.0f};
    const double below = two_to_the(log2_of(ratio)), scale = below < ratio ? 2 * below : below;
    return {static_cast<float>(scale), static_cast<float>(1 / scale)};
  }
  FORMULA std::uint8_t quantise(float value) const {
    return e4m3_of(static_cast<float>(static_cast<double>(value) * factor));
  }
  FORMULA std::uint8_t biased_exponent() const { return static_cast<std::uint8_t>(fp32_bits(scale) >> 23); }
};

}  // namespace ferry::contract

#undef FORMULA
