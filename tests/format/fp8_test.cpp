// Quantises rows to e4m3 with 1 x 128 scales: random rows, every exponent, and hand-computed cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "format/fp8_rows.hpp"

namespace ferry::test {
namespace {

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

}  // namespace
}  // namespace ferry::test
