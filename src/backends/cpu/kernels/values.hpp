// The value types of a row: how loops load, convert and store them.
//
// The headers in this folder are compiled once for each instruction set. So all that they define has internal
// linkage or is always inlined, and they call no inline function of the standard library: the linker would
// merge its copies into one, possibly compiled for an instruction set that this processor lacks.
#pragma once

#include <cstdint>

#include "ferry/types.hpp"
#include "format/numbers.hpp"

namespace ferry::cpu {
namespace {

// Each type has: Bits, its storage; value(), its value in fp32; round(), the bits of an fp32 result rounded
// to the type; magnitude(), an integer that orders as |value| does, 0 for NaN; value_of_magnitude(), its
// inverse.
struct Bf16 {
  using Bits = std::uint16_t;
  FERRY_HD static float value(Bits bits) { return bf16_value(bits); }
  FERRY_HD static Bits round(float value) { return fp32_to_bf16(value); }
  FERRY_HD static std::int16_t magnitude(Bits bits) {
    const auto positive = static_cast<std::int16_t>(bits & 0x7FFF);
    return positive > 0x7F80 ? std::int16_t{0} : positive;
  }
  FERRY_HD static float value_of_magnitude(std::int16_t magnitude) {
    return bf16_value(static_cast<Bits>(magnitude));
  }
};

struct Fp16 {
  using Bits = std::uint16_t;
  FERRY_HD static float value(Bits bits) { return fp16_value(bits); }
  FERRY_HD static Bits round(float value) { return fp32_to_fp16(value); }
  FERRY_HD static std::int16_t magnitude(Bits bits) {
    const auto positive = static_cast<std::int16_t>(bits & 0x7FFF);
    return positive > 0x7C00 ? std::int16_t{0} : positive;
  }
  FERRY_HD static float value_of_magnitude(std::int16_t magnitude) {
    return fp16_value(static_cast<Bits>(magnitude));
  }
};

struct Fp32 {
  using Bits = std::uint32_t;
  FERRY_HD static float value(Bits bits) { return float_of(bits); }
  FERRY_HD static Bits round(float value) { return bits_of(canonical(value)); }
  FERRY_HD static std::int32_t magnitude(Bits bits) {
    const auto positive = static_cast<std::int32_t>(bits & ~kFp32Sign);
    return positive > kFp32Infinity ? 0 : positive;
  }
  FERRY_HD static float value_of_magnitude(std::int32_t magnitude) {
    return float_of(static_cast<Bits>(magnitude));
  }
};

// Calls use(Bf16{}), use(Fp16{}) or use(Fp32{}).
template <class Use>
FERRY_HD auto with_type(DType type, Use use) {
  switch (type) {
    case DType::bf16:
      return use(Bf16{});
    case DType::fp16:
      return use(Fp16{});
    default:
      return use(Fp32{});
  }
}

// Rows need not be aligned to their type, nor be declared as arrays of it.
template <class Type>
FERRY_HD typename Type::Bits load(const char* row, std::int64_t column) {
  typename Type::Bits bits;
  __builtin_memcpy(&bits, row + column * static_cast<std::int64_t>(sizeof bits), sizeof bits);
  return bits;
}

template <class Type>
FERRY_HD void store(char* row, std::int64_t column, typename Type::Bits bits) {
  __builtin_memcpy(row + column * static_cast<std::int64_t>(sizeof bits), &bits, sizeof bits);
}

}  // namespace
}  // namespace ferry::cpu
