// Quantising kernels: fp8, the MX formats and NVFP4, compared with the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "format/decode.hpp"
#include "format/quantised_rows.hpp"

namespace ferry::test {
namespace {

// ---- Quantises rows to e4m3 with 1 x 128 scales: random rows, every exponent, and hand-computed cases.

using Fp8 = Fp8Rows;

INSTANTIATE_TEST_SUITE_P(Isa, Fp8, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST_P(Fp8, RandomRowsOfAnyLength) {
  for (const DType type : kTypes) {
    for (int i = 0; i < 300; ++i) {
      const std::int64_t columns = i < 150 ? i : below(random_, 3000);
      Memory in(columns * bytes_of(type), below(random_, 64));
      fill_random(random_, type, in);
      ASSERT_NO_FATAL_FAILURE(expect_row(in, type)) << to_string(type) << " x " << columns;
    }
  }
}

// amax near 448 times a power of two, where s / 448 and its power of two round, for every exponent.
TEST_P(Fp8, Fp32AmaxOfEveryExponent) {
  for (std::uint32_t exponent = 0; exponent <= 255; ++exponent) {
    for (const std::uint32_t fraction : {0x000000u, 0x000001u, 0x5FFFFFu, 0x600000u, 0x600001u, 0x7FFFFFu}) {
      const std::uint32_t amax = exponent << 23 | fraction;
      const auto element = [&](int) { return static_cast<std::uint32_t>(random_() % (amax + 1)); };
      ASSERT_NO_FATAL_FAILURE(expect_block(DType::fp32, amax, element)) << std::hex << amax;
    }
  }
}

struct Encoded {
  float scale;
  int first;  // the block's first value
  int rest;   // every other one
};

Encoded encode_pair(const cpu::Kernels& kernels, float first, float rest, const Fp8Options& options) {
  std::vector<float> in(128, rest);
  in[0] = first;
  std::vector<std::uint8_t> values(128);
  float scales[4];
  kernels.encode_row({values.data(), scales}, in.data(), DType::fp32, 128,
                     encoding_of(Format::fp8_e4m3(options)), 1.0f);
  return {scales[0], values[0], values[1]};
}

TEST_P(Fp8, HandComputedCases) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto expect = [&](float first, float rest, const Fp8Options& options, const Encoded& expected) {
    const Encoded got = encode_pair(kernels_, first, rest, options);
    EXPECT_EQ(got.scale, expected.scale) << first << " " << rest;
    EXPECT_EQ(got.first, expected.first) << first << " " << rest;
    EXPECT_EQ(got.rest, expected.rest) << first << " " << rest;
  };
  expect(0.0f, -0.0f, kFp32Scales, {1e-4f / 448, 0x00, 0x80});
  expect(0.0f, -0.0f, kPowerOfTwo, {0x1p-22f, 0x00, 0x80});
  expect(448.0f, 1.0f, kFp32Scales, {1.0f, 0x7E, 0x38});
  expect(448.0f, 1.0f, kPowerOfTwo, {1.0f, 0x7E, 0x38});
  expect(-449.0f, 2.0f, kPowerOfTwo, {2.0f, 0xF6, 0x38});
  expect(kNan, 448.0f, kFp32Scales, {1.0f, 0x7F, 0x7E});
  expect(-kNan, -kNan, kFp32Scales, {1e-4f / 448, 0x7F, 0x7F});
  expect(kInfinity, -1.0f, kFp32Scales, {kInfinity, 0x7F, 0x80});
  expect(-kInfinity, 1.0f, kPowerOfTwo, {kInfinity, 0x7F, 0x00});
  expect(kInfinity, kNan, kFp32Scales, {kInfinity, 0x7F, 0x7F});
}

TEST_P(Fp8, PackedExponents) {
  std::vector<float> in(5 * 128, 448.0f);
  in[128] = 449.0f;       // 2
  in[2 * 128] = 3.0e38f;  // 2^120
  in[3 * 128] = std::numeric_limits<float>::infinity();
  std::vector<std::uint8_t> values(in.size());
  std::uint8_t scales[16];
  std::fill(std::begin(scales), std::end(scales), std::uint8_t{0x7F});
  kernels_.encode_row({values.data(), scales}, in.data(), DType::fp32, static_cast<std::int64_t>(in.size()),
                      encoding_of(Format::fp8_e4m3(kPacked)), 1.0f);
  const std::vector<int> expected{127, 128, 247, 255, 127, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(std::vector<int>(scales, scales + 16), expected);
}

// ---- Quantises rows to mxfp8 and mxfp4: random rows, every exponent, and hand-computed cases.

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

// ---- Quantises rows to NVFP4: random rows with named and random scales, and hand-computed cases.

using Nvfp4 = Nvfp4Rows;

INSTANTIATE_TEST_SUITE_P(Isa, Nvfp4, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST_P(Nvfp4, RandomRowsOfAnyLength) {
  const std::vector<float> scales = global_scales();
  for (const DType type : kTypes) {
    for (int i = 0; i < 300; ++i) {
      const std::int64_t columns = 2 * (i < 150 ? i : below(random_, 1500));
      Memory in(columns * bytes_of(type), below(random_, 64));
      fill_random(random_, type, in);
      const float near = std::ldexp(1.0f, static_cast<int>(below(random_, 24)) - 16);
      const float listed = scales[static_cast<std::size_t>(below(random_, std::ssize(scales)))];
      ASSERT_NO_FATAL_FAILURE(expect_row(in, type, near)) << to_string(type) << " x " << columns;
      ASSERT_NO_FATAL_FAILURE(expect_row(in, type, listed)) << to_string(type) << " x " << columns;
      ASSERT_NO_FATAL_FAILURE(expect_row(in, type, 0, true)) << to_string(type) << " x " << columns;
    }
  }
}

TEST_P(Nvfp4, HandComputedCases) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kLargest = std::numeric_limits<float>::max();
  // The scale byte, and the codes of the block's first value and of every other one.
  const auto expect = [&](float g, float first, float rest, int scale, int code, int others) {
    std::vector<float> in(16, rest);
    in[0] = first;
    std::uint8_t values[8], scales[16];
    const bool valid =
        kernels_.encode_row({values, scales}, in.data(), DType::fp32, 16, encoding_of(Format::nvfp4()), g);
    EXPECT_EQ(valid, scale != 0x7F) << g;
    EXPECT_EQ(scales[0], scale) << g << " " << first << " " << rest;
    EXPECT_EQ(values[0] & 15, code) << g << " " << first << " " << rest;
    EXPECT_EQ(values[0] >> 4, others) << g << " " << first << " " << rest;
  };
  expect(1, 6, -0.25f, 0x38, 7, 8);  // 0.25 is a tie between 0 and 0.5
  expect(2, -6, kNan, 0x30, 15, 7);  // t = 0.5
  expect(1, 102, 85, 0x58, 7, 7);  // t = 17, a tie between 16 and 18: 102 / 16 saturates; 85 / 16 is above 5
  expect(0x1.b62e14p0f, 0x1.d869acp7f, 0, 0x5C, 7, 0);  // t is a tie of 22 and 24 only if divided by 6 first
  expect(1, 3000, 2000, 0x7E, 7, 6);                    // t = 500 saturates at 448; 2000 / 448 is below 5
  expect(4096, 6, 6, 0, 0, 0);                          // t is less than half of the smallest scale
  expect(4096, 6, -6, 0, 0, 0);                         // without a sign
  expect(1, kInfinity, -1e30f, 0x7E, 7, 15);
  expect(1, kNan, kNan, 0, 0, 0);
  expect(kLargest, kInfinity, 1, 0x7F, 0, 0);  // 448 * g overflows
  expect(kLargest, kLargest, 1, 0x23, 7, 0);   // t = 1 / 6 is 0.171875
  for (const float g : {0.0f, -0.0f, -1.0f, kInfinity, -kInfinity, kNan}) expect(g, 6, kNan, 0x7F, 0, 0);
}

// g of rows with a scale of their own.
TEST_P(Nvfp4, RowScalesByHand) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto expect = [&](float first, float rest, float g, int scale) {
    std::vector<float> in(32, rest);
    in[17] = first;
    std::uint8_t values[16], scales[16];
    float own = -1;
    EXPECT_TRUE(kernels_.encode_row({values, scales, &own}, in.data(), DType::fp32, 32,
                                    encoding_of(Format::nvfp4({.per_token = true})), kNan));
    EXPECT_EQ(own, g) << first << " " << rest;
    EXPECT_EQ(scales[1], scale) << first << " " << rest;
  };
  expect(2688, 1, 1, 0x7E);
  expect(-5376, kNan, 2, 0x7E);
  expect(kInfinity, 2688, 1, 0x7E);  // an infinity does not count in g, and its block's scale saturates
  expect(kInfinity, -kInfinity, 0x1p-126f, 0x7E);
  expect(0, -0.0f, 0x1p-126f, 0);
  expect(0x1.4p-115f, 0, 0x1p-126f, 0x7D);  // 2^-126 is larger than amax / 2688; t = 426.7
}

// With a scale for each token: docs/formats.md bounds how far decoded values are from the row's.
TEST_P(Nvfp4, DecodedRowsAreWithinTheirBound) {
  constexpr std::int64_t columns = 128, block = 16;
  const Encoding encoding = encoding_of(Format::nvfp4({.per_token = true}));
  for (int i = 0; i < 2000; ++i) {
    const int magnitude = static_cast<int>(below(random_, 200)) - 100, spread = 1 + i % 20;
    std::vector<float> in(columns);
    for (float& x : in) {
      const float fraction = static_cast<float>(below(random_, 1 << 24)) / (1 << 23) - 1;
      x = std::ldexp(fraction, magnitude - static_cast<int>(below(random_, spread)));
    }
    std::uint8_t values[columns / 2], scales[16];  // a row has its scales padded to 16 bytes
    float g = -1;
    ASSERT_TRUE(kernels_.encode_row({values, scales, &g}, in.data(), DType::fp32, columns, encoding, 0));
    const auto largest_of = [&](std::int64_t first, std::int64_t count) {
      double largest = 0;
      for (std::int64_t c = first; c < first + count; ++c)
        largest = std::max(largest, std::abs(double{in[c]}));
      return largest;
    };
    const double row = largest_of(0, columns);
    for (std::int64_t c = 0; c < columns; ++c) {
      const double scale = double{e4m3_to_fp32(scales[c / block])} * g;
      const double decoded = quantised_element(encoding, values, c) * scale;
      const double bound = 17.0 / 96 * largest_of(c / block * block, block) + std::ldexp(row, -18);
      ASSERT_LE(std::abs(decoded - in[c]), bound) << "column " << c << " of row " << i << ": " << in[c];
    }
  }
}

}  // namespace
}  // namespace ferry::test
