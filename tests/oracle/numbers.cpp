#include "oracle/numbers.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace ferry::oracle {
namespace {

// A binary floating-point type with a sign: `fraction_bits` fraction bits, normal exponents from `lowest` to
// `highest`.
struct Binary {
  int fraction_bits;
  int lowest;
  int highest;

  constexpr int exponent_bits() const { return highest > 15 ? 8 : (highest > 8 ? 5 : 4); }
  constexpr std::uint32_t sign_bit() const { return std::uint32_t{1} << (fraction_bits + exponent_bits()); }
  constexpr std::uint32_t infinity() const {
    return ((std::uint32_t{1} << exponent_bits()) - 1) << fraction_bits;
  }
};

constexpr Binary kBf16{7, -126, 127};
constexpr Binary kFp16{10, -14, 15};
constexpr Binary kFp32{23, -126, 127};
constexpr Binary kE4m3{3, -6, 8};

// floor(log2 |value|), but at least the lowest normal exponent: denormals have that exponent. `value` is
// finite. 0 and the denormals of double, whose field is 0, are below every type.
template <Binary type>
int exponent_of(double value) {
  const auto field = static_cast<int>(std::bit_cast<std::uint64_t>(value) >> 52 & 0x7FF);
  return std::max(field - 1023, type.lowest);
}

// 2^exponent, for the exponents of normal doubles. Much faster than std::ldexp.
double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

template <Binary type>
double to_nearest(double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int last_place = exponent_of<type>(value) - type.fraction_bits;
  return std::nearbyint(value * power_of_two(-last_place)) * power_of_two(last_place);
}

// The bits of a value that the type represents exactly.
template <Binary type>
std::uint32_t bits_of(double value) {
  const std::uint32_t sign = std::signbit(value) ? type.sign_bit() : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  const int exponent = exponent_of<type>(magnitude);
  const auto significand =
      static_cast<std::uint32_t>(magnitude * power_of_two(type.fraction_bits - exponent));
  // The leading one of a normal significand adds 1 to the exponent field; a denormal has none, and its field
  // is 0.
  const auto exponent_field = static_cast<std::uint32_t>(exponent - type.lowest) << type.fraction_bits;
  return sign | (exponent_field + significand);
}

template <Binary type>
double value_of(std::uint32_t bits) {
  const double sign = (bits & type.sign_bit()) ? -1.0 : 1.0;
  const std::uint32_t magnitude = bits & (type.sign_bit() - 1);
  if (magnitude > type.infinity()) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == type.infinity()) return sign * std::numeric_limits<double>::infinity();
  const std::uint32_t fraction = magnitude & ((std::uint32_t{1} << type.fraction_bits) - 1);
  const auto exponent = static_cast<int>(magnitude >> type.fraction_bits);
  if (exponent == 0) return sign * fraction * power_of_two(type.lowest - type.fraction_bits);
  const std::uint32_t significand = fraction | (std::uint32_t{1} << type.fraction_bits);
  return sign * significand * power_of_two(type.lowest + exponent - 1 - type.fraction_bits);
}

template <Binary type>
std::uint32_t encoded(double value) {
  if (std::isnan(value)) return type.sign_bit() - 1;  // the canonical NaN: all bits except the sign
  const double near = to_nearest<type>(value);
  if (std::fabs(near) < power_of_two(type.highest + 1)) return bits_of<type>(near);
  return (std::signbit(near) ? type.sign_bit() : 0) | type.infinity();
}

template <Binary type>
float rounded_to(float value) {
  return static_cast<float>(value_of<type>(encoded<type>(value)));
}

}  // namespace

float load(DType type, const std::byte* from) {
  if (type == DType::fp32) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, from, 4);
    return static_cast<float>(value_of<kFp32>(bits));
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, from, 2);
  return static_cast<float>(type == DType::bf16 ? value_of<kBf16>(bits) : value_of<kFp16>(bits));
}

void store(DType type, float value, std::byte* to) {
  if (type == DType::fp32) {
    const std::uint32_t bits = encoded<kFp32>(value);
    std::memcpy(to, &bits, 4);
    return;
  }
  const auto bits =
      static_cast<std::uint16_t>(type == DType::bf16 ? encoded<kBf16>(value) : encoded<kFp16>(value));
  std::memcpy(to, &bits, 2);
}

float rounded(DType type, float value) {
  if (type == DType::fp32) return value;
  return type == DType::bf16 ? rounded_to<kBf16>(value) : rounded_to<kFp16>(value);
}

std::uint8_t e4m3(double value) {
  if (std::isnan(value)) return 0x7F;
  const double near = to_nearest<kE4m3>(value);
  return static_cast<std::uint8_t>(bits_of<kE4m3>(std::clamp(near, -448.0, 448.0)));
}

void convert(DType from_type, const std::byte* from, DType to_type, std::byte* to, std::int64_t count) {
  if (from_type == to_type) {
    std::memcpy(to, from, static_cast<std::size_t>(count * bytes_of(from_type)));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    store(to_type, load(from_type, from + i * bytes_of(from_type)), to + i * bytes_of(to_type));
  }
}

}  // namespace ferry::oracle
