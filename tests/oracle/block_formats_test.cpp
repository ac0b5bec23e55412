// The integer arithmetic of the block formats: values worked out by hand, division and multiplication of the
// machine, and bounds of the error.
#include "oracle/block_formats.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "seed.hpp"

namespace ferry::oracle {
namespace {

class OracleBlocks : public testing::Test {
 protected:
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  static constexpr float kLargest = std::numeric_limits<float>::max();

  std::mt19937_64 random_{test::seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(test::seed())};

  // Any bits but those of a NaN; positive.
  float positive(bool finite) {
    const std::uint32_t bound = kInfinityBits + (finite ? 0 : 1);
    return std::bit_cast<float>(static_cast<std::uint32_t>(random_() % bound));
  }

  // Values that differ from 2^exponent by up to `spread` powers of two, of both signs.
  std::vector<float> row(std::size_t columns, int exponent, int spread) {
    std::vector<float> values(columns);
    for (float& value : values) {
      const auto fraction = static_cast<float>(random_() % (1 << 24)) / (1 << 23) - 1;
      value = std::ldexp(fraction, exponent - static_cast<int>(random_() % static_cast<unsigned>(spread)));
    }
    return values;
  }
};

TEST_F(OracleBlocks, ElementsByHand) {
  const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (std::uint8_t code = 0; code < 8; ++code) {
    EXPECT_EQ(decode_element(Element::e2m1, code), e2m1[code]);
    EXPECT_EQ(decode_element(Element::e2m1, code + 8), -e2m1[code]);
  }
  const std::pair<float, int> narrow[] = {
      {0.25f, 0},     {0.75f, 2},       {1.25f, 2},  {1.75f, 4},   {2.5f, 4},      {3.5f, 6},
      {5, 6},         {5.25f, 7},       {7, 7},      {1e30f, 7},   {kInfinity, 7}, {-0.0f, 8},
      {-0.25f, 8},    {-kInfinity, 15}, {-0.26f, 9}, {kNan, 7},    {-kNan, 7},     {0.26f, 1},
      {0x1p-149f, 0}, {4.99f, 6},       {5.01f, 7},  {-5.01f, 15}, {0.2499f, 0}};
  for (const auto& [value, code] : narrow) EXPECT_EQ(encode_element(Element::e2m1, value), code) << value;
  const std::pair<float, int> wide[] = {
      {448, 0x7E},   {449, 0x7E},       {464, 0x7E},       {1e30f, 0x7E},  {-448, 0xFE},
      {kNan, 0x7F},  {-kNan, 0x7F},     {17, 0x58},        {19, 0x5A},     {0x1p-9f, 1},
      {0x1p-10f, 0}, {0x1.8p-9f, 2},    {-0x1p-10f, 0x80}, {0x1p-6f, 8},   {0x1.Ep-7f, 8},
      {-0.0f, 0x80}, {kInfinity, 0x7E}, {1, 0x38},         {0x1.Dp-7f, 7}, {0x1.000002p-10f, 1}};
  for (const auto& [value, code] : wide) EXPECT_EQ(encode_element(Element::e4m3, value), code) << value;
  EXPECT_EQ(decode_element(Element::e4m3, 0x7E), 448);
  EXPECT_EQ(decode_element(Element::e4m3, 0x81), -0x1p-9f);
  EXPECT_TRUE(std::isnan(decode_element(Element::e4m3, 0xFF)));
}

TEST_F(OracleBlocks, EveryElementIsUnchangedByDecodingAndEncoding) {
  for (const auto& [element, codes] : {std::pair{Element::e2m1, 16}, std::pair{Element::e4m3, 256}}) {
    for (int code = 0; code < codes; ++code) {
      const float value = decode_element(element, static_cast<std::uint8_t>(code));
      if (std::isnan(value)) continue;
      for (int exponent = -120; exponent <= 110; ++exponent)
        EXPECT_EQ(encode_element(element, std::ldexp(value, exponent), exponent), code) << exponent;
    }
  }
}

// The machine divides and multiplies as IEEE 754 says, which is another path to the same bits.
TEST_F(OracleBlocks, QuotientsAndProductsAreThoseOfTheMachine) {
  const float named[] = {0x1p-149f, 0x1p-126f, 0x1.FFFFFEp-127f, 1, 3, 6, 2688,
                         448,       kLargest,  0x1.FFFFFEp-1f};
  for (int i = 0; i < 300'000; ++i) {
    float a = i % 4 == 0 ? named[random_() % std::size(named)] : positive(i % 4 == 1);
    float b = i % 3 == 0 ? named[random_() % std::size(named)] : positive(true);
    if (i % 5 == 0) a = std::bit_cast<float>(static_cast<std::uint32_t>(random_() % 0x00800000));  // denormal
    if (i % 7 == 0) a = b * static_cast<float>(random_() % 64);  // quotients that are exact, or nearly
    if (b == 0) b = 1;
    ASSERT_EQ(magnitude_bits(fp32_quotient(a, b)), magnitude_bits(a / b)) << a << " / " << b;
    if (std::isinf(a)) continue;
    ASSERT_EQ(magnitude_bits(fp32_product(a, b)), magnitude_bits(a * b)) << a << " * " << b;
  }
}

TEST_F(OracleBlocks, MxExponentsByHand) {
  struct {
    float amax;
    Element element;
    int up, ocp;
  } const cases[] = {{448, Element::e4m3, 0, 0},
                     {448.0001f, Element::e4m3, 1, 0},
                     {511, Element::e4m3, 1, 0},
                     {512, Element::e4m3, 1, 1},
                     {1, Element::e4m3, -8, -8},
                     {6, Element::e2m1, 0, 0},
                     {6.000001f, Element::e2m1, 1, 0},
                     {7.9f, Element::e2m1, 1, 0},
                     {0, Element::e2m1, -127, -127},
                     {0x1p-149f, Element::e4m3, -127, -127},
                     {0x1p-119f, Element::e4m3, -127, -127},
                     {0x1p-118f, Element::e4m3, -126, -126},
                     {0x1.8p-125f, Element::e2m1, -127, -127},
                     {0x1.9p-125f, Element::e2m1, -126, -127},
                     {kLargest, Element::e4m3, 120, 119},
                     {kLargest, Element::e2m1, 126, 125},
                     {kInfinity, Element::e4m3, 127, 127},
                     {kInfinity, Element::e2m1, 127, 127}};
  for (const auto& c : cases) {
    EXPECT_EQ(mx_exponent(c.amax, c.element, MxRule::up), c.up) << c.amax;
    EXPECT_EQ(mx_exponent(c.amax, c.element, MxRule::ocp), c.ocp) << c.amax;
  }
}

TEST_F(OracleBlocks, MxRowsByHand) {
  // Two blocks, the second of two columns.
  std::vector<float> row(34, 0.25f);
  row[1] = -6;
  row[2] = kNan;
  row[32] = 3;
  row[33] = -kInfinity;
  const BlockRow fp4 = encode_mx(row, Element::e2m1, MxRule::ocp);
  EXPECT_EQ(fp4.scales, (std::vector<std::uint8_t>{127, 254}));
  std::vector<std::uint8_t> values(17, 0x00);
  values[0] = 0xF0;
  values[1] = 0x07;
  values[16] = 0xF0;
  EXPECT_EQ(fp4.values, values);
  row.resize(32);
  const BlockRow fp8 = encode_mx(row, Element::e4m3, MxRule::up);  // amax 6 = 1.5 * 2^2: e = -6
  EXPECT_EQ(fp8.scales, (std::vector<std::uint8_t>{121}));
  EXPECT_EQ(fp8.values[0], 0x58);  // 16
  EXPECT_EQ(fp8.values[1], 0xFC);  // -384
  EXPECT_EQ(fp8.values[2], 0x7F);
  EXPECT_EQ(encode_mx(std::vector<float>{kNan, -0.0f}, Element::e4m3, MxRule::up).scales[0], 0);
  EXPECT_TRUE(encode_mx({}, Element::e4m3, MxRule::up).values.empty());
}

TEST_F(OracleBlocks, Nvfp4ByHand) {
  const std::vector<float> row{6, -3, 0.25f, kNan};  // amax 6: t = 1
  const BlockRow one = encode_nvfp4(row, 1);
  EXPECT_EQ(one.scales, (std::vector<std::uint8_t>{0x38}));
  EXPECT_EQ(one.values, (std::vector<std::uint8_t>{0xD7, 0x70}));
  EXPECT_EQ(encode_nvfp4(row, 0.5f).scales[0], 0x40);  // t = 2, the same quotients
  EXPECT_EQ(encode_nvfp4(row, 0.5f).values, one.values);
  // t = 1 / 4096 is below half of the smallest scale: 0, and every code is 0.
  EXPECT_EQ(encode_nvfp4(row, 4096).scales[0], 0);
  EXPECT_EQ(encode_nvfp4(row, 4096).values, (std::vector<std::uint8_t>{0, 0}));
  // t = 2^40 saturates at 448.
  EXPECT_EQ(encode_nvfp4(row, 0x1p-40f).scales[0], 0x7E);
  EXPECT_EQ(encode_nvfp4(row, 0x1p-40f).values, (std::vector<std::uint8_t>{0xF7, 0x77}));
  // 17 * 6 / 6 = 17 is a tie between 16 and 18.
  EXPECT_EQ(encode_nvfp4(std::vector<float>{102}, 1).scales[0], 0x58);
  // fl(amax / 6) / g is 23, a tie between 22 and 24; amax / (6 * g), rounded once less, is below.
  EXPECT_EQ(encode_nvfp4(std::vector<float>{0x1.d869acp7f}, 0x1.b62e14p0f).scales[0], 0x5C);
  for (const float g : {0.0f, -0.0f, -1.0f, kInfinity, -kInfinity, kNan}) {
    EXPECT_EQ(encode_nvfp4(row, g).scales[0], 0x7F) << g;
    EXPECT_EQ(encode_nvfp4(row, g).values, (std::vector<std::uint8_t>{0, 0})) << g;
  }
  // An infinity gives the largest scale, whose product with g is finite or not.
  const std::vector<float> infinite{kInfinity, 1};
  EXPECT_EQ(encode_nvfp4(infinite, 1).scales[0], 0x7E);
  EXPECT_EQ(encode_nvfp4(infinite, 1).values[0], 0x07);
  EXPECT_EQ(encode_nvfp4(infinite, kLargest).scales[0], 0x7F);
  EXPECT_EQ(encode_nvfp4(infinite, kLargest).values[0], 0);
  // 2^-149 / 6 is 0 in fp32.
  EXPECT_EQ(nvfp4_block_scale(0x1p-149f, 0x1p-149f).divisor, 0);
}

TEST_F(OracleBlocks, RowScalesByHand) {
  EXPECT_EQ(nvfp4_row_scale(std::vector<float>{2688, -1}), 1);
  EXPECT_EQ(nvfp4_row_scale(std::vector<float>{-5376, kInfinity, kNan}), 2);
  EXPECT_EQ(nvfp4_row_scale(std::vector<float>{0, -0.0f}), 0x1p-126f);
  EXPECT_EQ(nvfp4_row_scale(std::vector<float>{kInfinity}), 0x1p-126f);
  EXPECT_EQ(nvfp4_row_scale(std::vector<float>{0x1p-115f}), 0x1p-126f);
  EXPECT_EQ(nvfp4_row_scale(std::vector<float>{0x1.5p-115f}), 0x1p-126f);
  EXPECT_EQ(nvfp4_row_scale(std::vector<float>{0x1.5p-114f}), 0x1p-125f);
}

// Under the rule `up` nothing saturates: a value is off by at most half a place of its element, which is at
// most 1/16 of it (e4m3) or 1/4 (e2m1), or by half of the smallest element.
TEST_F(OracleBlocks, MxErrorIsBounded) {
  for (int i = 0; i < 2000; ++i) {
    const auto columns = 1 + random_() % 100;
    const std::vector<float> in = row(columns, static_cast<int>(random_() % 200) - 100, 12);
    for (const Element element : {Element::e2m1, Element::e4m3}) {
      const bool narrow = element == Element::e2m1;
      const BlockRow out = encode_mx(in, element, MxRule::up);
      const std::vector<double> back = decode_mx(out, element, static_cast<std::int64_t>(columns));
      for (std::size_t c = 0; c < columns; ++c) {
        const double scale = std::ldexp(1.0, out.scales[c / kMxColumns] - 127);
        const double relative = std::fabs(double{in[c]}) * (narrow ? 0.25 : 1.0 / 16);
        ASSERT_LE(std::fabs(back[c] - in[c]), std::max(relative, scale * (narrow ? 0.25 : 0x1p-10))) << in[c];
      }
    }
  }
}

// With a scale of its own, no block of a row saturates at 448 and none overflows: a scale is off by at most
// 1/16, or, for blocks far below the row's largest value, by half of the smallest scale. The largest value of
// a block may so be up to 6 * 17 / 16 scales; it is clamped at 6. docs/formats.md states the bound by amax.
TEST_F(OracleBlocks, Nvfp4PerTokenErrorIsBounded) {
  for (int i = 0; i < 2000; ++i) {
    const auto columns = 1 + random_() % 100;
    const std::vector<float> in = row(columns, static_cast<int>(random_() % 200) - 100, 4);
    const double amax = largest_magnitude(in), g = nvfp4_row_scale(in);
    const std::span<const float> values(in);
    const BlockRow out = encode_nvfp4(in, static_cast<float>(g));
    const std::vector<double> back = decode_nvfp4(out, static_cast<std::int64_t>(columns));
    for (std::size_t c = 0; c < columns; ++c) {
      ASSERT_NE(out.scales[c / kNvfp4Columns], 0x7F);
      const double scale = decode_element(Element::e4m3, out.scales[c / kNvfp4Columns]) * g;
      const double half_place = std::max(scale / 4, std::fabs(double{in[c]}) / 4);
      ASSERT_LE(std::fabs(back[c] - in[c]), std::max(half_place, amax * 6 * 0x1p-10 / 2688) * 1.00001)
          << in[c];
      const std::size_t first = c / kNvfp4Columns * kNvfp4Columns;
      const double block =
          largest_magnitude(values.subspan(first, std::min<std::size_t>(16, columns - first)));
      ASSERT_LE(std::fabs(back[c] - in[c]), 17.0 / 96 * block + std::ldexp(amax, -18)) << in[c];
    }
  }
}

}  // namespace
}  // namespace ferry::oracle
