// Quantising kernels: fp8, the MX formats and NVFP4, compared with the oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "format/parts.hpp"
#include "format/quantised_rows.hpp"

namespace ferry::test {
namespace {

using Quantised = QuantisedRows;
INSTANTIATE_TEST_SUITE_P(Formats, Quantised, quantised_rows(), name_of_rows);

TEST_P(Quantised, RandomRowsOfAnyLength) {
  for (const DType type : kTypes) {
    for (int i = 0; i < 300; ++i) {
      std::int64_t columns = i < 150 ? i : below(random_, 3000);
      if (&family_ != &kFp8) columns *= 2;
      Memory in(columns * bytes_of(type), below(random_, 64));
      fill_random(random_, type, in);
      ASSERT_NO_FATAL_FAILURE(expect_row(in, type)) << to_string(type) << " x " << columns;
    }
  }
}

// Fractions around those where scales and their powers of two round, for every exponent, infinity and NaN
// included.
TEST_P(Quantised, Fp32AmaxOfEveryExponent) {
  for (std::uint32_t exponent = 0; exponent <= 255; ++exponent) {
    for (const std::uint32_t fraction : {0x000000u, 0x000001u, 0x3FFFFFu, 0x400000u, 0x400001u, 0x5FFFFFu,
                                         0x600000u, 0x600001u, 0x7FFFFFu}) {
      const std::uint32_t amax = exponent << 23 | fraction;
      const auto element = [&](int) {
        return static_cast<std::uint32_t>(random_() % (amax + 1)) | static_cast<std::uint32_t>(random_())
                                                                        << 31;
      };
      ASSERT_NO_FATAL_FAILURE(expect_block(DType::fp32, amax, element)) << std::hex << amax;
    }
  }
}

// One value beside a block of another, also with scales of which none can be formed.
TEST_P(Quantised, SpecialValues) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                  kNan = std::numeric_limits<float>::quiet_NaN(),
                  kLargest = std::numeric_limits<float>::max();
  const float special[] = {0,         -0.0f,      0.25f, 0.75f,  1,         -1,          -6,      7,
                           102,       448,        449,   -449,   2688,      -5376,       kNan,    -kNan,
                           kInfinity, -kInfinity, 3e38f, -1e30f, 0x1p-149f, 0x1.4p-115f, kLargest};
  for (const float first : special) {
    for (const float rest : special) {
      std::vector<float> row(static_cast<std::size_t>(family_.block), rest);
      row[row.size() / 2 + 1] = first;
      for (const Format& format : family_.formats) {
        for (const float g :
             {1.0f, 2.0f, 0x1.b62e14p0f, 4096.0f, kLargest, 0.0f, -0.0f, -1.0f, kInfinity, -kInfinity, kNan})
          ASSERT_NO_FATAL_FAILURE(expect_row(row, format, g)) << first << " beside " << rest;
      }
    }
  }
}

// The smallest scale is a denormal fp32 number.
TEST(MxDecoding, KeepsTheSmallestScale) {
  EXPECT_EQ(scale_of_exponent(0), 0x1p-127f);
  EXPECT_EQ(scale_of_exponent(1), 0x1p-126f);
  EXPECT_EQ(scale_of_exponent(254), 0x1p127f);
  EXPECT_EQ(scale_of_exponent(255), std::numeric_limits<float>::infinity());
}

TEST(MxDecoding, ReadsEveryCode) {
  for (const bool narrow : {false, true}) {
    const Encoding encoding = encoding_of(narrow ? Format::mxfp4() : Format::mxfp8());
    const NumberTable& table = narrow ? NumberTable::e2m1() : NumberTable::e4m3();
    for (std::uint32_t code = 0; code < (narrow ? 16u : 256u); ++code) {
      if (std::isnan(table.decode(code))) continue;
      const std::uint8_t low = static_cast<std::uint8_t>(code), high = static_cast<std::uint8_t>(code << 4);
      EXPECT_EQ(quantised_element(encoding, &low, 0), table.decode(code)) << code;
      if (!narrow) continue;
      EXPECT_EQ(quantised_element(encoding, &high, 1), table.decode(code)) << code;
    }
  }
}

}  // namespace
}  // namespace ferry::test
