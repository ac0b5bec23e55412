// The oracle's number types, fp8 scales and dot product against values worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "oracle/dispatch.hpp"
#include "oracle/encode.hpp"
#include "oracle/numbers.hpp"

namespace ferry::oracle {
namespace {

std::uint32_t stored(DType type, float value) {
  std::uint32_t bits = 0;
  store(type, value, reinterpret_cast<std::byte*>(&bits));
  return bits;
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(OracleNumbers, Bf16RoundsToNearestEven) {
  EXPECT_EQ(stored(DType::bf16, 1.0f), 0x3F80u);
  EXPECT_EQ(stored(DType::bf16, 1.0f + std::ldexp(1.0f, -8)), 0x3F80u);  // tie, down
  EXPECT_EQ(stored(DType::bf16, 1.0f + std::ldexp(3.0f, -8)), 0x3F82u);  // tie, up
  EXPECT_EQ(stored(DType::bf16, 1.0f + std::ldexp(1.0f, -8) + std::ldexp(1.0f, -20)),
            0x3F81u);  // above the tie
  EXPECT_EQ(stored(DType::bf16, -0.0f), 0x8000u);
  EXPECT_EQ(stored(DType::bf16, std::numeric_limits<float>::max()), 0x7F80u);
  EXPECT_EQ(stored(DType::bf16, -kInfinity), 0xFF80u);
  EXPECT_EQ(stored(DType::bf16, -kNan), 0x7FFFu);
  EXPECT_EQ(stored(DType::bf16, std::ldexp(1.0f, -133)), 1u);  // least denormal
  EXPECT_EQ(stored(DType::bf16, std::ldexp(1.0f, -134)), 0u);  // tie to zero
}

TEST(OracleNumbers, Fp16RoundsToNearestEven) {
  EXPECT_EQ(stored(DType::fp16, 1.0f), 0x3C00u);
  EXPECT_EQ(stored(DType::fp16, 65504.0f), 0x7BFFu);
  EXPECT_EQ(stored(DType::fp16, 65519.0f), 0x7BFFu);
  EXPECT_EQ(stored(DType::fp16, 65520.0f), 0x7C00u);  // tie, to infinity
  EXPECT_EQ(stored(DType::fp16, std::ldexp(1.0f, -24)), 1u);
  EXPECT_EQ(stored(DType::fp16, std::ldexp(1.0f, -25)), 0u);
  EXPECT_EQ(stored(DType::fp16, std::ldexp(3.0f, -25)), 2u);
  EXPECT_EQ(stored(DType::fp16, -std::ldexp(1.0f, -14)), 0x8400u);
  EXPECT_EQ(stored(DType::fp16, kNan), 0x7FFFu);
  EXPECT_EQ(stored(DType::fp32, kNan), 0x7FFFFFFFu);
}

TEST(OracleNumbers, E4m3SaturatesAndRoundsToNearestEven) {
  EXPECT_EQ(e4m3(448.0f), 0x7E);
  EXPECT_EQ(e4m3(464.0f), 0x7E);  // where infinity would begin
  EXPECT_EQ(e4m3(-kInfinity), 0xFE);
  EXPECT_EQ(e4m3(kNan), 0x7F);
  EXPECT_EQ(e4m3(-1.0f), 0xB8);
  EXPECT_EQ(e4m3(17.0f), 0x58);  // between 16 and 18
  EXPECT_EQ(e4m3(19.0f), 0x5A);  // between 18 and 20
  EXPECT_EQ(e4m3(std::ldexp(1.0f, -9)), 0x01);
  EXPECT_EQ(e4m3(std::ldexp(1.0f, -10)), 0x00);
  EXPECT_EQ(e4m3(std::ldexp(1.5f, -9)), 0x02);
  EXPECT_EQ(e4m3(std::ldexp(1.0f, -6)), 0x08);
  EXPECT_EQ(e4m3(-0.0f), 0x80);
}

TEST(OracleNumbers, EveryFiniteValueIsUnchangedByLoadAndStore) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float value = load(type, reinterpret_cast<const std::byte*>(&bits));
      if (std::isnan(value)) continue;
      ASSERT_EQ(stored(type, value), bits);
    }
  }
}

// 128 columns whose largest magnitude is `largest`, then a block of 16 zeros.
std::vector<float> two_blocks(float largest) {
  std::vector<float> row(144, 0.0f);
  row[0] = 1.0f;
  row[5] = -largest;
  return row;
}

using Parts = std::vector<std::vector<std::byte>>;

TEST(OracleNumbers, Fp8ScalesByTheLargestMagnitudeOfEachBlock) {
  const Parts parts = encoded_row(two_blocks(896), Format::fp8_e4m3());
  const std::vector<std::byte>& values = parts[0];
  ASSERT_EQ(values.size(), 144u);
  ASSERT_EQ(parts[1].size(), 8u);
  EXPECT_EQ(values[0], std::byte{0x30});  // 1 / 2
  EXPECT_EQ(values[5], std::byte{0xFE});  // -448
  EXPECT_EQ(values[143], std::byte{0});
  float scale[2];
  std::memcpy(scale, parts[1].data(), sizeof scale);
  EXPECT_EQ(scale[0], 2.0f);
  EXPECT_EQ(scale[1], 1e-4f / 448.0f);
}

TEST(OracleNumbers, Fp8PowersOfTwoRoundTheScaleUp) {
  const Parts exact = encoded_row(two_blocks(896), Format::fp8_e4m3({.power_of_two = true}));
  const Parts above = encoded_row(two_blocks(900), Format::fp8_e4m3({.power_of_two = true}));
  float scale[2];
  std::memcpy(scale, exact[1].data(), sizeof scale);
  EXPECT_EQ(scale[0], 2.0f);
  std::memcpy(scale, above[1].data(), sizeof scale);
  EXPECT_EQ(scale[0], 4.0f);
  EXPECT_EQ(scale[1], std::ldexp(1.0f, -22));  // 1e-4 / 448 = 1.87 * 2^-23
  EXPECT_EQ(above[0][5], std::byte{0xF6});     // -225 -> -224

  const Parts packed = encoded_row(two_blocks(900), Format::fp8_e4m3({.power_of_two = true, .packed = true}));
  const std::vector<std::byte> word{std::byte{129}, std::byte{105}, std::byte{0}, std::byte{0}};
  EXPECT_EQ(packed[1], word);
}

TEST(OracleNumbers, Fp8IgnoresNanAndKeepsInfinityFinite) {
  std::vector<float> row(128, 2.0f);
  row[1] = kNan;
  const Parts with_nan = encoded_row(row, Format::fp8_e4m3());
  EXPECT_EQ(with_nan[0][0], std::byte{0x7E});
  EXPECT_EQ(with_nan[0][1], std::byte{0x7F});
  row[1] = -kInfinity;
  const Parts with_infinity = encoded_row(row, Format::fp8_e4m3());
  EXPECT_EQ(with_infinity[0][0], std::byte{0});     // 2 * 0
  EXPECT_EQ(with_infinity[0][1], std::byte{0x7F});  // infinity * 0
}

TEST(OracleNumbers, DotAddsInItsFixedOrder) {
  std::vector<float> ones(264, 1.0f), x(16, 0.0f);
  EXPECT_EQ(dot(ones, ones), 264.0f);
  x[0] = 16777216.0f;  // 2^24: adding 1 is lost, adding 2 is not
  x[1] = 1.0f;
  x[4] = 1.0f;
  EXPECT_EQ(dot(x, ones), 16777216.0f);
  x[4] = 0.0f;
  x[3] = 1.0f;
  EXPECT_EQ(dot(x, ones), 16777218.0f);  // 1 and 3 are added to each other before 0 is
  x[3] = 0.0f;
  x[9] = 1.0f;
  EXPECT_EQ(dot(x, ones), 16777216.0f);  // another group of eight: each 1 is added to 2^24 and lost
}

}  // namespace
}  // namespace ferry::oracle
