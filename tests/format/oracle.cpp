#include "format/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace ferry::test {

NumberTable::NumberTable(int exponent_bits, int fraction_bits, int specials, bool saturates)
    : sign_(1u << (exponent_bits + fraction_bits)), saturates_(saturates) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int per_exponent = 1 << fraction_bits;
  const int codes = static_cast<int>(sign_) - specials;
  for (int code = 0; code <= codes; ++code) {
    const int exponent = code / per_exponent, fraction = code % per_exponent;
    const double significand = exponent == 0 ? fraction : per_exponent + fraction;
    values_.push_back(significand * std::pow(2.0, std::max(exponent, 1) - bias - fraction_bits));
  }
}

const NumberTable& NumberTable::bf16() {
  static const NumberTable table(8, 7, 1 << 7, false);
  return table;
}

const NumberTable& NumberTable::fp16() {
  static const NumberTable table(5, 10, 1 << 10, false);
  return table;
}

const NumberTable& NumberTable::e4m3() {
  static const NumberTable table(4, 3, 1, true);
  return table;
}

const NumberTable& NumberTable::e2m1() {
  static const NumberTable table(2, 1, 0, true);
  return table;
}

std::uint32_t NumberTable::encode(double value) const {
  if (std::isnan(value)) return nan();
  const std::uint32_t sign = std::signbit(value) ? sign_ : 0;
  const double magnitude = std::fabs(value);
  if (magnitude >= values_.back()) return sign | over();
  // The value below or at the magnitude (low), and the next one above it.
  const auto above = std::upper_bound(values_.begin(), values_.end(), magnitude);
  const auto low = static_cast<std::uint32_t>(above - values_.begin()) - 1;
  const double middle = midpoint(low);
  const bool up = magnitude > middle || (magnitude == middle && low % 2 == 1);
  return sign | std::min(low + (up ? 1 : 0), over());
}

double NumberTable::decode(std::uint32_t bits) const {
  const double sign = bits & sign_ ? -1.0 : 1.0;
  const std::uint32_t code = bits & (sign_ - 1);
  if (code <= largest()) return sign * values_[code];
  if (!saturates_ && code == largest() + 1) return sign * std::numeric_limits<double>::infinity();
  return std::numeric_limits<double>::quiet_NaN();
}

std::uint32_t encode(DType type, float value) {
  if (type != DType::fp32) return NumberTable::of(type).encode(value);
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return std::isnan(value) ? 0x7FFFFFFFu : bits;
}

float decode(DType type, std::uint32_t bits) {
  if (type != DType::fp32) return static_cast<float>(NumberTable::of(type).decode(bits));
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace ferry::test
