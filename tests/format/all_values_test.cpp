// Conversions of all values: numbers, fp8, the MX formats and NVFP4.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "format/blocks.hpp"
#include "format/numbers.hpp"
#include "format/oracle.hpp"
#include "format/quantised_rows.hpp"

namespace ferry::test {
namespace {

// ---- Converts every fp32 in ascending order to each 8- and 16-bit type: the nearest value never decreases.

constexpr std::uint32_t kInfinity = 0x7F800000u;

float fp32(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The bits of the smallest fp32 that rounds to code + 1.
std::uint32_t first_above(const NumberTable& table, std::uint32_t code) {
  const auto tie = static_cast<float>(table.midpoint(code));
  std::uint32_t bits;
  std::memcpy(&bits, &tie, sizeof bits);
  return code % 2 == 0 ? bits + 1 : bits;
}

template <class Convert>
void expect_all(const NumberTable& table, Convert convert) {
  std::uint32_t bits = 0;
  for (std::uint32_t code = 0; code <= table.over(); ++code) {
    const std::uint32_t end = code == table.over() ? kInfinity + 1 : first_above(table, code);
    std::uint32_t wrong = 0;
    for (; bits < end; ++bits) {
      wrong += convert(fp32(bits)) != code;
      wrong += convert(fp32(bits | 0x80000000u)) != (code | table.sign());
    }
    ASSERT_EQ(wrong, 0u) << std::hex << "code " << code;
  }
  std::uint32_t wrong = 0;
  for (; bits <= 0x7FFFFFFFu; ++bits) {
    wrong += convert(fp32(bits)) != table.nan();
    wrong += convert(fp32(bits | 0x80000000u)) != table.nan();
  }
  ASSERT_EQ(wrong, 0u) << "NaN";
}

TEST(AllNumbers, Bf16) {
  expect_all(NumberTable::bf16(), [](float x) { return std::uint32_t{fp32_to_bf16(x)}; });
}

TEST(AllNumbers, Fp16) {
  expect_all(NumberTable::fp16(), [](float x) { return std::uint32_t{fp32_to_fp16(x)}; });
}

TEST(AllNumbers, E4m3) {
  expect_all(NumberTable::e4m3(), [](float x) { return std::uint32_t{fp32_to_e4m3(x)}; });
}

// ---- Rows of every family of formats: every 16-bit value as the largest of a block and as any other
// element, and random fp32 values.

using AllQuantised = QuantisedRows;
INSTANTIATE_TEST_SUITE_P(Formats, AllQuantised, quantised_rows(), name_of_rows);

TEST_P(AllQuantised, Every16BitValueAsAmax) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t amax = 0; amax < 65536; ++amax) {
      const auto element = [&](int) { return bits_up_to(random_, amax); };
      ASSERT_NO_FATAL_FAILURE(expect_block(type, amax, element))
          << to_string(type) << " " << std::hex << amax;
    }
  }
}

TEST_P(AllQuantised, Every16BitValueAsElement) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    std::vector<std::uint32_t> largest{0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00,
                                       0x3F80, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80};
    for (int i = 0; i < 22; ++i) largest.push_back(static_cast<std::uint32_t>(below(random_, 0x8000)));
    for (const std::uint32_t amax : largest) {
      for (std::uint32_t first = 0; first < 65536; first += static_cast<std::uint32_t>(family_.block)) {
        const auto element = [&](int c) { return first + static_cast<std::uint32_t>(c); };
        ASSERT_NO_FATAL_FAILURE(expect_block(type, amax, element))
            << to_string(type) << " " << std::hex << amax;
      }
    }
  }
}

TEST_P(AllQuantised, RandomFp32) {
  ASSERT_NO_FATAL_FAILURE(expect_random_fp32(1 << 22));
}

// ---- The MX formats: every 16-bit value with every scale, and every fp32 value at which a code changes.

using AllMx = QuantisedRows;
INSTANTIATE_TEST_SUITE_P(Formats, AllMx, quantised_rows({&kMx}), name_of_rows);

TEST(AllMxElements, Every16BitValueWithEveryScale) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      const float value = decode(type, bits);
      for (int exponent = -127; exponent <= 127; ++exponent) {
        const float scaled = value * power_of_two(-exponent);
        ASSERT_EQ(fp32_to_e4m3(scaled), oracle::encode_element(oracle::Element::e4m3, value, exponent))
            << value << " 2^" << exponent;
        ASSERT_EQ(fp32_to_e2m1(scaled), oracle::encode_element(oracle::Element::e2m1, value, exponent))
            << value << " 2^" << exponent;
      }
    }
  }
}

// Where codes change, in blocks of every scale: each element and each midpoint of two, with its fp32
// neighbours.
TEST_P(AllMx, Fp32BoundariesOfEveryCode) {
  for (const oracle::Element element : {oracle::Element::e2m1, oracle::Element::e4m3}) {
    const std::uint8_t largest = element == oracle::Element::e2m1 ? 7 : 0x7E;
    std::vector<float> boundaries;
    for (std::uint8_t code = 0; code < largest; ++code) {
      const float value = oracle::decode_element(element, code);
      const float next = oracle::decode_element(element, static_cast<std::uint8_t>(code + 1));
      boundaries.insert(boundaries.end(), {value, (value + next) / 2});
    }
    for (int exponent = -127; exponent <= 127; ++exponent) {
      std::vector<float> row;
      const float amax = std::ldexp(oracle::decode_element(element, largest), exponent);
      if (std::isinf(amax)) break;
      for (const float boundary : boundaries) {
        const float at = std::ldexp(boundary, exponent);
        for (const float value : {at, std::nextafter(at, 0.0f), std::nextafter(at, amax)}) {
          if (row.size() % oracle::kMxColumns == 0) row.push_back(amax);
          row.push_back(random_() % 2 == 0 ? value : -value);
        }
      }
      row.resize((row.size() + 1) / 2 * 2);
      for (const Format& format : kMx.formats)
        ASSERT_NO_FATAL_FAILURE(expect_row(row, format)) << "exponent " << exponent;
    }
  }
}

// ---- NVFP4: every 16-bit value with every scale, and every fp32 value at which a scale or a code changes.

using AllNvfp4 = QuantisedRows;
INSTANTIATE_TEST_SUITE_P(Formats, AllNvfp4, quantised_rows({&kNvfp4}), name_of_rows);

TEST(AllNvfp4Scales, Every16BitValueWithEveryGlobalScale) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t bits = 0; bits < 32768; ++bits) {
      const float amax = decode(type, bits);
      if (std::isnan(amax)) continue;
      const float own = nvfp4_row_scale(std::isinf(amax) ? 0 : amax);
      ASSERT_EQ(own, oracle::nvfp4_row_scale(std::vector<float>{amax})) << amax;
      for (const float g : global_scales()) {
        const Nvfp4Scale scale = nvfp4_scale(amax, g);
        const oracle::Nvfp4BlockScale expected = oracle::nvfp4_block_scale(amax, g);
        ASSERT_EQ(scale.stored, expected.stored) << amax << ", g " << g;
        ASSERT_EQ(scale.divisor, expected.divisor) << amax << ", g " << g;
      }
    }
  }
}

// Four global scales of the list at random: all_values_long_test.cpp has all of them.
TEST(AllNvfp4Codes, Every16BitValueWithEveryScale) {
  Random random(seed());
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(seed()));
  const std::vector<float> scales = global_scales();
  for (int i = 0; i < 4; ++i) {
    const float g = scales[static_cast<std::size_t>(below(random, std::ssize(scales)))];
    for (const DType type : {DType::bf16, DType::fp16}) ASSERT_NO_FATAL_FAILURE(expect_every_code(type, g));
  }
}

// Blocks whose t is next to each e4m3 value and each midpoint of two, with values next to every midpoint of
// codes.
TEST_P(AllNvfp4, Fp32BoundariesOfEveryScaleAndCode) {
  std::array<bool, 0x7F> seen{};
  for (const float g : global_scales()) {
    std::vector<float> row;
    for (std::uint8_t s = 1; s < 0x7F; ++s) {
      const double value = oracle::decode_element(oracle::Element::e4m3, s);
      const double below = oracle::decode_element(oracle::Element::e4m3, static_cast<std::uint8_t>(s - 1));
      for (const double t : {value, (value + below) / 2}) {
        float amax = static_cast<float>(6 * t * g);
        if (std::isinf(amax)) continue;
        for (int step = 0; step < 2; ++step) amax = std::nextafter(amax, 0.0f);
        for (int step = -2; step <= 2; ++step, amax = std::nextafter(amax, HUGE_VALF)) {
          const oracle::Nvfp4BlockScale scale = oracle::nvfp4_block_scale(amax, g);
          if (scale.stored != 0x7F) seen[scale.stored] = true;
          row.push_back(amax);
          for (std::uint8_t code = 0; code < 7; ++code) {
            const float middle =
                (oracle::decode_element(oracle::Element::e2m1, code) +
                 oracle::decode_element(oracle::Element::e2m1, static_cast<std::uint8_t>(code + 1))) /
                2;
            const auto at = static_cast<float>(double{middle} * double{scale.divisor});
            const bool up = random_() % 2 == 0;
            for (const float near : {at, std::nextafter(at, up ? HUGE_VALF : 0.0f)})
              row.push_back(std::copysign(std::min(near, amax), random_() % 2 == 0 ? 1.0f : -1.0f));
          }
          row.push_back(0);
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_row(row, Format::nvfp4(), g));
  }
  for (std::size_t s = 0; s < seen.size(); ++s) EXPECT_TRUE(seen[s]) << "scale " << s;
}

}  // namespace
}  // namespace ferry::test
