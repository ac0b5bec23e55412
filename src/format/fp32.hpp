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

}  // namespace ferry
