// Quantises rows to NVFP4: random rows with named and random scales, and hand-computed cases.
#include <algorithm>
#include <cmath>
#include <limits>

#include "format/decode.hpp"
#include "format/nvfp4_rows.hpp"

namespace ferry::test {
namespace {

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
