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

namespace {

// fp32 operations computed in double. For products and quotients of two fp32 numbers, rounding to double
// first does not change the result.
float divide(float a, float b) {
  return static_cast<float>(static_cast<double>(a) / static_cast<double>(b));
}
float multiply(float a, float b) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
}

float power_at_least(float value) {
  if (std::isinf(value)) return value;
  float power = std::ldexp(1.0f, -126);
  while (power < value) power *= 2;
  return power;
}

}  // namespace

Fp8Block encode_fp8_block(const std::vector<float>& values, bool power_of_two) {
  float amax = 0;
  for (const float value : values) {
    if (!std::isnan(value)) amax = std::max(amax, std::fabs(value));
  }
  const float s = std::max(amax, 1e-4f);
  const float ratio = divide(s, 448.0f);
  Fp8Block block;
  block.scale = power_of_two ? power_at_least(ratio) : ratio;
  block.exponent = static_cast<std::uint8_t>(std::isinf(block.scale) ? 255 : std::ilogb(block.scale) + 127);
  const float factor = power_of_two ? divide(1.0f, block.scale) : divide(448.0f, s);
  for (const float value : values) {
    block.values.push_back(static_cast<std::uint8_t>(NumberTable::e4m3().encode(multiply(value, factor))));
  }
  return block;
}

}  // namespace ferry::test
