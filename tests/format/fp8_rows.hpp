// Encodes rows to fp8 with all options and compares every byte with the formula, computed in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/oracle.hpp"
#include "format/parts.hpp"
#include "format/support.hpp"

namespace ferry::test {

inline constexpr Fp8Options kFp32Scales{};
inline constexpr Fp8Options kPowerOfTwo{.power_of_two = true};
inline constexpr Fp8Options kPacked{.power_of_two = true, .packed = true};

class Fp8Rows : public testing::TestWithParam<const cpu::Kernels*> {
 protected:
  const cpu::Kernels& kernels_ = *GetParam();
  Random random_{seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(seed())};

  // Encodes the row with `options` and compares every byte written.
  void expect_row(const Memory& in, DType type, const Fp8Options& options) {
    const std::int64_t columns = in.bytes() / bytes_of(type);
    Memory values(columns, below(random_, 64));
    Memory scales(parts_of(Format::fp8_e4m3(options), columns).part[1].wire_bytes, 16 * below(random_, 4));
    kernels_.encode_row({values.data(), scales.data()}, in.data(), type, columns,
                        encoding_of(Format::fp8_e4m3(options)), 1.0f);
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
    for (const Fp8Options& options : {kFp32Scales, kPowerOfTwo, kPacked}) {
      ASSERT_NO_FATAL_FAILURE(expect_row(in, type, options));
    }
  }

  // Tests a block with `amax` in a random column and element(c) in the others.
  template <class Element>
  void expect_block(DType type, std::uint32_t amax, Element element) {
    Memory in(128 * bytes_of(type));
    for (int c = 0; c < 128; ++c) in.set_bits(type, c, element(c));
    in.set_bits(type, below(random_, 128), amax);
    expect_row(in, type);
  }
};

}  // namespace ferry::test
