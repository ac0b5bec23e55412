// Quantises rows to mxfp8 and mxfp4: random rows, every exponent, and hand-computed cases.
#include <limits>

#include "format/decode.hpp"
#include "format/mx_rows.hpp"

namespace ferry::test {
namespace {

using Mx = MxRows;

INSTANTIATE_TEST_SUITE_P(Isa, Mx, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST_P(Mx, RandomRowsOfAnyLength) {
  for (const DType type : kTypes) {
    for (int i = 0; i < 300; ++i) {
      const std::int64_t columns = 2 * (i < 150 ? i : below(random_, 1500));
      Memory in(columns * bytes_of(type), below(random_, 64));
      fill_random(random_, type, in);
      ASSERT_NO_FATAL_FAILURE(expect_row(in, type)) << to_string(type) << " x " << columns;
    }
  }
}

// Fractions around 1.5 and 1.75, where the rules differ, for every exponent, infinity and NaN included.
TEST_P(Mx, Fp32AmaxOfEveryExponent) {
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

TEST_P(Mx, HandComputedCases) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  // The scale byte, and the codes of the block's first value and of every other one.
  const auto expect = [&](const Format& format, float first, float rest, int scale, int code, int others) {
    std::vector<float> in(32, rest);
    in[0] = first;
    std::uint8_t values[32], scales[16];
    kernels_.encode_row({values, scales}, in.data(), DType::fp32, 32, encoding_of(format), 1.0f);
    EXPECT_EQ(scales[0], scale) << to_string(format) << " " << first << " " << rest;
    const bool narrow = format.kind == FormatKind::mxfp4;
    EXPECT_EQ(narrow ? values[0] & 15 : values[0], code) << to_string(format) << " " << first << " " << rest;
    EXPECT_EQ(narrow ? values[0] >> 4 : values[1], others)
        << to_string(format) << " " << first << " " << rest;
  };
  const Format up = Format::mxfp8(), ocp = Format::mxfp8({.rule = MxRule::ocp});
  expect(up, 448.0f, -0.0f, 127, 0x7E, 0x80);
  expect(up, 449.0f, 2.0f, 128, 0x76, 0x38);   // m > 1.75: 2^1; 224.5 is 224
  expect(ocp, 449.0f, 2.0f, 127, 0x7E, 0x40);  // clamped at 448
  expect(up, 0.0f, -0.0f, 0, 0x00, 0x80);
  expect(up, kInfinity, -1.0f, 254, 0x7E, 0x80);
  expect(up, kNan, kNan, 0, 0x7F, 0x7F);
  const Format fp4 = Format::mxfp4(), fp4_up = Format::mxfp4({.rule = MxRule::up});
  expect(fp4, 6.0f, 0.25f, 127, 7, 0);    // 0.25 is a tie between 0 and 0.5
  expect(fp4, -6.0f, 0.75f, 127, 15, 2);  // between 0.5 and 1
  expect(fp4, 7.0f, 5.0f, 127, 7, 6);     // clamped at 6; 5 is a tie between 4 and 6
  expect(fp4_up, 7.0f, 5.0f, 128, 6, 4);  // 3.5 is a tie between 3 and 4; 2.5 between 2 and 3
  expect(fp4, -kInfinity, kNan, 254, 15, 7);
  expect(fp4, 0x1p-149f, 0.0f, 0, 0, 0);  // 2^-22 after the clamped scale of 2^-127
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
