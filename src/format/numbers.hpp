// The bits of fp32 values, and the operations whose results are defined to the bit.
//
// The conversions in this folder have no branches and no tables, so that compilers vectorise loops over them.
// They call compiler built-ins instead of the standard library, whose inline functions the linker would merge
// between sources that are compiled for different instruction sets.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"

namespace ferry {

FERRY_HD constexpr std::uint32_t bits_of(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}

FERRY_HD constexpr float float_of(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

FERRY_HD constexpr float float_of(std::int32_t bits) {
  return __builtin_bit_cast(float, bits);
}

inline constexpr std::uint32_t kFp32Sign = 0x80000000u;
inline constexpr std::int32_t kFp32Infinity = 0x7F800000u;
inline constexpr std::uint32_t kFp32Nan = 0x7FFFFFFFu;  // the canonical NaN

// The bits without the sign. They compare like the magnitudes.
FERRY_HD constexpr std::int32_t magnitude_of(std::uint32_t bits) {
  return static_cast<std::int32_t>(bits & ~kFp32Sign);
}

FERRY_HD constexpr std::int32_t magnitude_of(float value) {
  return magnitude_of(bits_of(value));
}

// All ones if the magnitude is above the limit, otherwise 0.
//
// Why masks: where a result is stored in fewer bits, vectorisers compute it in those bits and convert every
// operand, the conditions of selections included. The conversions therefore use masks, smaller() and
// larger(), and compose a result in the upper bits of a word, which is then shifted down.
FERRY_HD constexpr std::int32_t mask_above(std::int32_t magnitude, std::int32_t limit) {
  return (limit - magnitude) >> 31;
}

FERRY_HD constexpr std::int32_t smaller(std::int32_t a, std::int32_t b) {
  return a < b ? a : b;
}

FERRY_HD constexpr std::int32_t larger(std::int32_t a, std::int32_t b) {
  return a > b ? a : b;
}

FERRY_HD constexpr std::uint32_t mask_nan(std::uint32_t bits) {
  return static_cast<std::uint32_t>(mask_above(magnitude_of(bits), kFp32Infinity));
}

// Rounds a magnitude to a type with `fraction` bits of fraction and smallest normal value `lowest`: to
// nearest, ties to even. Returns the type's bits, also for denormals. Exponents above the type's largest are
// not clamped.
//
// How: c is the power of two whose last place in fp32 is the type's last place at this magnitude. Adding c
// rounds, and the difference of the bits counts the last places.
FERRY_HD constexpr std::uint32_t narrow_magnitude(std::int32_t magnitude, int fraction, float lowest) {
  const std::int32_t exponent = larger(magnitude & kFp32Infinity, magnitude_of(lowest));
  const std::int32_t c = exponent + ((23 - fraction) << 23);
  const std::int32_t sum = magnitude_of(float_of(magnitude) + float_of(c));
  return static_cast<std::uint32_t>((sum - c) + ((exponent - magnitude_of(lowest)) >> (23 - fraction)));
}

// A computed value: every NaN becomes the canonical NaN.
FERRY_HD constexpr float canonical(float value) {
  const std::uint32_t bits = bits_of(value);
  return float_of(magnitude_of(bits) > kFp32Infinity ? kFp32Nan : bits);
}

// a * b + c, rounded once.
FERRY_HD float fused_multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

// bf16: the upper 16 bits of an fp32.

// The exact value, as an operand of arithmetic. A NaN keeps its payload; canonical() removes it from the
// result.
FERRY_HD constexpr float bf16_value(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

FERRY_HD constexpr float bf16_to_fp32(std::uint16_t bits) {
  return canonical(bf16_value(bits));
}

// The rounded value in the upper 16 bits; the lower 16 bits hold anything.
FERRY_HD constexpr std::uint32_t fp32_to_bf16_above(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded =
      bits + 0x7FFFu + (bits >> 16 & 1);  // may carry into infinity, which is correct
  return magnitude_of(bits) > kFp32Infinity ? kFp32Nan : rounded;
}

FERRY_HD constexpr std::uint16_t fp32_to_bf16(float value) {
  return static_cast<std::uint16_t>(fp32_to_bf16_above(value) >> 16);
}

// fp16: 5 bits of exponent, 10 bits of fraction.

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

// e4m3: 4 bits of exponent, 3 bits of fraction, no infinity, and one NaN of each sign. The largest value is
// 448.

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

// e2m1: 2 bits of exponent, 1 bit of fraction, no infinity and no NaN: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, each
// with either sign. Two values are stored in a byte, the even column in the low four bits.

inline constexpr float kE2m1Lowest = 1.0f;  // smallest normal value
inline constexpr float kE2m1Max = 6.0f;

// The value of four bits.
FERRY_HD constexpr float e2m1_to_fp32(std::uint8_t bits) {
  const std::uint32_t magnitude = bits & 0x7u;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8u) << 28;
  const std::uint32_t normal = (magnitude << 22) + (126u << 23);  // exponent bias 1 -> 127
  const std::uint32_t denormal = magnitude == 0 ? 0 : bits_of(0.5f);
  return float_of(sign | (magnitude < 2 ? denormal : normal));
}

// Rounds to nearest, ties to even. Infinities and values above 6 become 6 with their sign; NaN becomes +6.
FERRY_HD constexpr std::uint8_t fp32_to_e2m1(float value) {
  const std::int32_t magnitude = smaller(magnitude_of(value), magnitude_of(kE2m1Max));
  const std::uint32_t sign = bits_of(value) & kFp32Sign & ~mask_nan(bits_of(value));
  // smaller() has turned a NaN into 6.
  return static_cast<std::uint8_t>((sign | narrow_magnitude(magnitude, 1, kE2m1Lowest) << 28) >> 28);
}

}  // namespace ferry
