// An independent implementation of the number formats: tables of values in double, and searches in them.
// Shares nothing with src/format.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/format.hpp"

namespace ferry::test {

// A type of up to 16 bits, as the table of its non-negative values in the order of their bits.
class NumberTable {
 public:
  static const NumberTable& bf16();
  static const NumberTable& fp16();
  static const NumberTable& e4m3();
  static const NumberTable& e2m1();
  static const NumberTable& of(DType type) { return type == DType::bf16 ? bf16() : fp16(); }

  // Bits of the nearest value; a tie goes to even bits.
  std::uint32_t encode(double value) const;

  // The value; NaN if the bits are a NaN.
  double decode(std::uint32_t bits) const;

  // Midway between the values of `bits` and `bits` + 1. The latter may be the value that would follow the
  // largest.
  double midpoint(std::uint32_t bits) const { return (values_[bits] + values_[bits + 1]) / 2; }

  std::uint32_t largest() const { return static_cast<std::uint32_t>(values_.size()) - 2; }
  std::uint32_t over() const {
    return saturates_ ? largest() : largest() + 1;
  }  // the bits of values that are too large
  std::uint32_t sign() const { return sign_; }
  std::uint32_t nan() const { return sign_ - 1; }

 private:
  // `specials`: patterns at the top that are no finite values. The type saturates if it has no infinity.
  NumberTable(int exponent_bits, int fraction_bits, int specials, bool saturates);

  std::vector<double> values_;  // the finite values, then the value that would follow
  std::uint32_t sign_;
  bool saturates_;
};

// The bits of a value stored as `type`, and the value of such bits.
std::uint32_t encode(DType type, float value);
float decode(DType type, std::uint32_t bits);

}  // namespace ferry::test
