// Rows quantised to e4m3 with 1 x 128 scales, against the formula carried out in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/kernels.hpp"
#include "format/oracle.hpp"
#include "format/parts.hpp"
#include "format/support.hpp"

namespace ferry::test {
namespace {

constexpr Fp8Options kPlain{};
constexpr Fp8Options kPowerOfTwo{.power_of_two = true};
constexpr Fp8Options kPacked{.power_of_two = true, .packed = true};

class Fp8 : public testing::TestWithParam<const cpu::Kernels*> {
 protected:
  const cpu::Kernels& kernels_ = *GetParam();
  Random random_{seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(seed())};

  // Encodes the row in one way and compares every byte written.
  void expect_row(const Memory& in, DType type, const Fp8Options& options) {
    const std::int64_t columns = in.bytes() / bytes_of(type);
    Memory values(columns, below(random_, 64));
    Memory scales(parts_of(Format::fp8_e4m3(options), columns).part[1].wire_bytes, 16 * below(random_, 4));
    kernels_.encode_fp8_row(values.data(), scales.data(), in.data(), type, columns, options);
    ASSERT_TRUE(values.guards_intact() && scales.guards_intact()) << columns;

    std::int64_t used = 0;
    for (std::int64_t first = 0, block = 0; first < columns; first += 128, ++block) {
      const std::int64_t count = std::min<std::int64_t>(128, columns - first);
      std::vector<float> numbers;
      for (std::int64_t c = first; c < first + count; ++c) numbers.push_back(decode(type, in.bits(type, c)));
      const Fp8Block expected = encode_fp8_block(numbers, options.power_of_two);
      for (std::int64_t c = 0; c < count; ++c) {
        ASSERT_EQ(std::to_integer<int>(values.data()[first + c]), expected.values[c])
            << to_string(Format::fp8_e4m3(options)) << ", column " << first + c << " = " << numbers[c]
            << ", scale " << expected.scale;
      }
      if (options.packed) {
        ASSERT_EQ(std::to_integer<int>(scales.data()[block]), expected.exponent) << "block " << block;
      } else {
        ASSERT_EQ(scales.fp32(block), expected.scale) << "block " << block;
      }
      used = (block + 1) * (options.packed ? 1 : 4);
    }
    for (; used < scales.bytes(); ++used) ASSERT_EQ(std::to_integer<int>(scales.data()[used]), 0);
  }

  void expect_row(const Memory& in, DType type) {
    for (const Fp8Options& options : {kPlain, kPowerOfTwo, kPacked}) {
      ASSERT_NO_FATAL_FAILURE(expect_row(in, type, options));
    }
  }

  // A block with `amax` at a random place, and else what `element` gives.
  template <class Element>
  void expect_block(DType type, std::uint32_t amax, Element element) {
    Memory in(128 * bytes_of(type));
    for (int c = 0; c < 128; ++c) in.set_bits(type, c, element(c));
    in.set_bits(type, below(random_, 128), amax);
    expect_row(in, type);
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, Fp8, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST_P(Fp8, Every16BitValueAsAmax) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t amax = 0; amax < 65536; ++amax) {
      const std::uint32_t magnitude = amax & 0x7FFF;
      // Smaller values, near and far, of both signs.
      const auto element = [&](int) {
        const auto word = static_cast<std::uint32_t>(random_());
        return static_cast<std::uint32_t>(magnitude * std::uint64_t{word >> 8 & 0xFFFF} >> 16) |
               (word & 0x8000);
      };
      ASSERT_NO_FATAL_FAILURE(expect_block(type, amax, element))
          << to_string(type) << " " << std::hex << amax;
    }
  }
}

TEST_P(Fp8, Every16BitValueAsElement) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    std::vector<std::uint32_t> largest{0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00,
                                       0x3F80, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80};
    for (int i = 0; i < 22; ++i) largest.push_back(static_cast<std::uint32_t>(below(random_, 0x8000)));
    for (const std::uint32_t amax : largest) {
      for (std::uint32_t first = 0; first < 65536; first += 128) {
        const auto element = [&](int c) { return first + static_cast<std::uint32_t>(c); };
        ASSERT_NO_FATAL_FAILURE(expect_block(type, amax, element))
            << to_string(type) << " " << std::hex << amax;
      }
    }
  }
}

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

// Quotients and powers at which fp32 rounds: s near multiples of 448 times powers of two, and every exponent.
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
  kernels.encode_fp8_row(values.data(), scales, in.data(), DType::fp32, 128, options);
  return {scales[0], values[0], values[1]};
}

TEST_P(Fp8, StatedCases) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto expect = [&](float first, float rest, const Fp8Options& options, const Encoded& expected) {
    const Encoded got = encode_pair(kernels_, first, rest, options);
    EXPECT_EQ(got.scale, expected.scale) << first << " " << rest;
    EXPECT_EQ(got.first, expected.first) << first << " " << rest;
    EXPECT_EQ(got.rest, expected.rest) << first << " " << rest;
  };
  expect(0.0f, -0.0f, kPlain, {1e-4f / 448, 0x00, 0x80});
  expect(0.0f, -0.0f, kPowerOfTwo, {0x1p-22f, 0x00, 0x80});
  expect(448.0f, 1.0f, kPlain, {1.0f, 0x7E, 0x38});
  expect(448.0f, 1.0f, kPowerOfTwo, {1.0f, 0x7E, 0x38});
  expect(-449.0f, 2.0f, kPowerOfTwo, {2.0f, 0xF6, 0x38});
  expect(kNan, 448.0f, kPlain, {1.0f, 0x7F, 0x7E});
  expect(-kNan, -kNan, kPlain, {1e-4f / 448, 0x7F, 0x7F});
  expect(kInfinity, -1.0f, kPlain, {kInfinity, 0x7F, 0x80});
  expect(-kInfinity, 1.0f, kPowerOfTwo, {kInfinity, 0x7F, 0x00});
  expect(kInfinity, kNan, kPlain, {kInfinity, 0x7F, 0x7F});
}

TEST_P(Fp8, PackedExponents) {
  std::vector<float> in(5 * 128, 448.0f);
  in[128] = 449.0f;       // 2
  in[2 * 128] = 3.0e38f;  // 2^120
  in[3 * 128] = std::numeric_limits<float>::infinity();
  std::vector<std::uint8_t> values(in.size());
  std::uint8_t scales[16];
  std::fill(std::begin(scales), std::end(scales), std::uint8_t{0x7F});
  kernels_.encode_fp8_row(values.data(), scales, in.data(), DType::fp32, static_cast<std::int64_t>(in.size()),
                          kPacked);
  const std::vector<int> expected{127, 128, 247, 255, 127, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(std::vector<int>(scales, scales + 16), expected);
}

}  // namespace
}  // namespace ferry::test
