// fp32 as bits, and the operations whose results are defined to the bit.
//
// The conversions beside this file have no branches and no tables, so that compilers vectorise loops over
// them. They call compiler built-ins, not the standard library: those leave no function behind that sources
// compiled for different instruction sets could share.
#pragma once

#include <cstdint>

#include "layout/host_device.hpp"

namespace ferry {

FERRY_HD constexpr std::uint32_t bits_of(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}

FERRY_HD constexpr float float_of(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

inline constexpr std::uint32_t kFp32Sign = 0x80000000u;
inline constexpr std::uint32_t kFp32Infinity = 0x7F800000u;
inline constexpr std::uint32_t kFp32Nan = 0x7FFFFFFFu;  // the canonical one

FERRY_HD constexpr bool is_nan_bits(std::uint32_t bits) {
  return (bits & ~kFp32Sign) > kFp32Infinity;
}

// A computed fp32: every NaN becomes the canonical one.
FERRY_HD constexpr float canonical(float value) {
  const std::uint32_t bits = bits_of(value);
  return float_of(is_nan_bits(bits) ? kFp32Nan : bits);
}

// a * b + c, rounded once.
FERRY_HD float fused_multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

}  // namespace ferry
