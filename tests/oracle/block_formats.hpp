// The formats whose rows are blocks with a scale byte each (mxfp8, mxfp4, nvfp4), in integer arithmetic: no
// result depends on the rounding of the machine or of a library. Includes nothing of src/.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "ferry/format.hpp"

namespace ferry::oracle {

enum class Element { e2m1, e4m3 };

inline constexpr std::int64_t kMxColumns = 32;     // of a block
inline constexpr std::int64_t kNvfp4Columns = 16;  // of a block
inline constexpr std::uint32_t kInfinityBits = 0x7F800000;

// A binary type, by the codes of its magnitudes: they count up from 0 through denormals and normals.
struct NumberType {
  int fraction_bits;
  int lowest;             // exponent of the smallest normal value
  std::uint32_t largest;  // code of the largest finite value
};

inline constexpr NumberType kFp32Type{23, -126, 0x7F7FFFFF};

constexpr NumberType type_of(Element element) {
  return element == Element::e2m1 ? NumberType{1, 0, 7} : NumberType{3, -6, 0x7E};
}

// The magnitude significand * 2^exponent, or, if `more`, between it and (significand + 1) * 2^exponent.
struct Magnitude {
  std::uint64_t significand;
  int exponent;
  bool more = false;

  // floor(log2), of a magnitude that is not 0.
  int log2() const { return static_cast<int>(std::bit_width(significand)) - 1 + exponent; }
};

// The magnitude of the code of a finite value.
inline Magnitude magnitude_of(std::uint32_t code, const NumberType& type) {
  const std::uint32_t one = 1u << type.fraction_bits;
  const std::uint32_t field = code / one, fraction = code % one;
  const int unit = type.lowest - type.fraction_bits;
  return field == 0 ? Magnitude{fraction, unit}
                    : Magnitude{one + fraction, unit + static_cast<int>(field) - 1};
}

// Code of the nearest value, ties to even; largest + 1 if the type has none that is large enough.
// `more` needs a significand that is at least two bits longer than the type's.
inline std::uint32_t nearest_code(const Magnitude& magnitude, const NumberType& type) {
  if (magnitude.significand == 0) return 0;
  const int exponent = std::max(magnitude.log2(), type.lowest);
  const int dropped = exponent - type.fraction_bits - magnitude.exponent;  // bits below the last place
  if (dropped > 64) return 0;  // less than half of the smallest value
  std::uint64_t units = 0;
  if (dropped <= 0) {
    if (magnitude.more) std::abort();  // the caller's quotient is too short
    units = magnitude.significand << -dropped;
  } else {
    const std::uint64_t half = std::uint64_t{1} << (dropped - 1);
    const std::uint64_t rest = magnitude.significand & (2 * half - 1);
    units = dropped == 64 ? 0 : magnitude.significand >> dropped;
    if (rest > half || (rest == half && (magnitude.more || units % 2 == 1))) ++units;
  }
  // The leading one of a normal significand adds 1 to the exponent field.
  const std::uint64_t code =
      (static_cast<std::uint64_t>(exponent - type.lowest) << type.fraction_bits) + units;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(code, type.largest + 1));
}

inline std::uint32_t magnitude_bits(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFF;
}
inline bool is_nan(float value) {
  return magnitude_bits(value) > kInfinityBits;
}

// a / b in fp32. Neither is NaN or negative; b is finite and not 0.
inline float fp32_quotient(float a, float b) {
  if (magnitude_bits(a) == 0 || magnitude_bits(a) == kInfinityBits) return a;
  Magnitude dividend = magnitude_of(magnitude_bits(a), kFp32Type);
  const Magnitude divisor = magnitude_of(magnitude_bits(b), kFp32Type);
  // Left-aligned in 64 bits: a quotient of at least 40 bits.
  const int shift = std::countl_zero(dividend.significand);
  dividend = {dividend.significand << shift, dividend.exponent - shift};
  const Magnitude quotient{dividend.significand / divisor.significand, dividend.exponent - divisor.exponent,
                           dividend.significand % divisor.significand != 0};
  return std::bit_cast<float>(nearest_code(quotient, kFp32Type));
}

// a * b in fp32. Neither is negative or NaN; both are finite.
inline float fp32_product(float a, float b) {
  const Magnitude left = magnitude_of(magnitude_bits(a), kFp32Type);
  const Magnitude right = magnitude_of(magnitude_bits(b), kFp32Type);
  return std::bit_cast<float>(
      nearest_code({left.significand * right.significand, left.exponent + right.exponent}, kFp32Type));
}

// The element nearest to value * 2^-exponent. Saturates with the value's sign; NaN becomes +6 or 7F.
inline std::uint8_t encode_element(Element element, float value, int exponent = 0) {
  const NumberType type = type_of(element);
  if (is_nan(value)) return element == Element::e2m1 ? 7 : 0x7F;
  const std::uint32_t bits = magnitude_bits(value);
  std::uint32_t code = type.largest;
  if (bits != kInfinityBits) {
    Magnitude magnitude = magnitude_of(bits, kFp32Type);
    magnitude.exponent -= exponent;
    code = std::min(nearest_code(magnitude, type), type.largest);
  }
  const std::uint32_t sign = element == Element::e2m1 ? 8 : 0x80;
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? sign : 0));
}

inline float decode_element(Element element, std::uint8_t code) {
  if (element == Element::e4m3 && (code & 0x7F) == 0x7F) return std::bit_cast<float>(0x7FFFFFFFu);
  const std::uint32_t sign = element == Element::e2m1 ? 8 : 0x80;
  const Magnitude magnitude = magnitude_of(code & (sign - 1), type_of(element));
  const float value = std::ldexp(static_cast<float>(magnitude.significand), magnitude.exponent);
  return (code & sign) != 0 ? -value : value;
}

// The largest magnitude, ignoring NaN and, if `finite`, infinities; 0 if nothing is left.
inline float largest_magnitude(std::span<const float> values, bool finite = false) {
  std::uint32_t largest = 0;
  for (const float value : values) {
    const std::uint32_t bits = magnitude_bits(value);
    if (bits < kInfinityBits + (finite ? 0 : 1)) largest = std::max(largest, bits);
  }
  return std::bit_cast<float>(largest);
}

// The exponent e of an MX block's scale.
inline int mx_exponent(float amax, Element element, MxRule rule) {
  const std::uint32_t bits = magnitude_bits(amax);
  if (bits == 0) return -127;
  if (bits == kInfinityBits) return 127;
  const Magnitude magnitude = magnitude_of(bits, kFp32Type);
  const int k = magnitude.log2();
  // The largest element is 7 * 2^6 or 3 * 2^1, with the leading one at 2^8 or 2^2. Compares amax with 7/4 or
  // 3/2 of 2^k.
  const bool narrow = element == Element::e2m1;
  const std::uint64_t leading = std::bit_floor(magnitude.significand);
  const bool over =
      narrow ? 2 * magnitude.significand > 3 * leading : 4 * magnitude.significand > 7 * leading;
  const int e = k - (narrow ? 2 : 8) + (rule == MxRule::up && over ? 1 : 0);
  return std::clamp(e, -127, 127);
}

// The scale byte of an NVFP4 block and what its values are divided by; 0: every code is 0.
struct Nvfp4BlockScale {
  std::uint8_t stored;
  float divisor;
};

inline Nvfp4BlockScale nvfp4_block_scale(float amax, float g) {
  const bool usable = !std::signbit(g) && magnitude_bits(g) > 0 && magnitude_bits(g) < kInfinityBits;
  if (!usable) return {0x7F, 0};
  const std::uint8_t s = encode_element(Element::e4m3, fp32_quotient(fp32_quotient(amax, 6), g));
  const float divisor = fp32_product(decode_element(Element::e4m3, s), g);
  if (magnitude_bits(divisor) == kInfinityBits) return {0x7F, 0};
  return {s, divisor};
}

inline std::uint8_t nvfp4_code(float value, float divisor) {
  if (divisor == 0) return 0;
  if (is_nan(value)) return 7;
  const float quotient = fp32_quotient(std::fabs(value), divisor);
  return encode_element(Element::e2m1, std::copysign(quotient, value));
}

// g of a row with a scale of its own.
inline float nvfp4_row_scale(std::span<const float> row) {
  const float g = fp32_quotient(largest_magnitude(row, true), 2688);
  return std::bit_cast<float>(std::max(magnitude_bits(g), 0x00800000u));  // 2^-126
}

// A row as it is stored, without the padding of its parts.
struct BlockRow {
  std::vector<std::uint8_t> values;  // e2m1: two columns to a byte, the even one in the low four bits
  std::vector<std::uint8_t> scales;  // one for each block
  float row_scale = 1;               // nvfp4: g
};

// Appends the code of the next column, `column`, to packed values.
inline void append_code(std::vector<std::uint8_t>& values, Element element, std::size_t column,
                        std::uint8_t code) {
  if (element == Element::e2m1 && column % 2 == 1) {
    values.back() = static_cast<std::uint8_t>(values.back() | code << 4);
  } else {
    values.push_back(code);
  }
}

inline std::uint8_t code_at(const BlockRow& row, Element element, std::size_t column) {
  if (element == Element::e4m3) return row.values[column];
  return static_cast<std::uint8_t>(row.values[column / 2] >> (column % 2 * 4) & 15);
}

inline BlockRow encode_mx(std::span<const float> row, Element element, MxRule rule) {
  BlockRow out;
  for (std::size_t first = 0; first < row.size(); first += kMxColumns) {
    const auto block = row.subspan(first, std::min<std::size_t>(kMxColumns, row.size() - first));
    const int exponent = mx_exponent(largest_magnitude(block), element, rule);
    out.scales.push_back(static_cast<std::uint8_t>(exponent + 127));
    for (std::size_t c = 0; c < block.size(); ++c)
      append_code(out.values, element, c, encode_element(element, block[c], exponent));
  }
  return out;
}

inline BlockRow encode_nvfp4(std::span<const float> row, float g) {
  BlockRow out{.values = {}, .scales = {}, .row_scale = g};
  for (std::size_t first = 0; first < row.size(); first += kNvfp4Columns) {
    const auto block = row.subspan(first, std::min<std::size_t>(kNvfp4Columns, row.size() - first));
    const Nvfp4BlockScale scale = nvfp4_block_scale(largest_magnitude(block), g);
    out.scales.push_back(scale.stored);
    for (std::size_t c = 0; c < block.size(); ++c)
      append_code(out.values, Element::e2m1, c, nvfp4_code(block[c], scale.divisor));
  }
  return out;
}

// The values of a row, exactly.
inline std::vector<double> decode_mx(const BlockRow& row, Element element, std::int64_t columns) {
  std::vector<double> values;
  for (std::int64_t c = 0; c < columns; ++c) {
    const auto column = static_cast<std::size_t>(c);
    values.push_back(std::ldexp(double{decode_element(element, code_at(row, element, column))},
                                row.scales[column / kMxColumns] - 127));
  }
  return values;
}

inline std::vector<double> decode_nvfp4(const BlockRow& row, std::int64_t columns) {
  std::vector<double> values;
  for (std::int64_t c = 0; c < columns; ++c) {
    const auto column = static_cast<std::size_t>(c);
    const double element = decode_element(Element::e2m1, code_at(row, Element::e2m1, column));
    const double scale = decode_element(Element::e4m3, row.scales[column / kNvfp4Columns]);
    values.push_back(element * scale * double{row.row_scale});
  }
  return values;
}

}  // namespace ferry::oracle
