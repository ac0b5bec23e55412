// Encodes rows to the MX formats and compares every byte with the formula, computed in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/oracle.hpp"
#include "format/parts.hpp"
#include "format/support.hpp"

namespace ferry::test {

inline const Format kMxFormats[] = {Format::mxfp8({.rule = MxRule::up}), Format::mxfp8({.rule = MxRule::ocp}),
                                    Format::mxfp4({.rule = MxRule::up}),
                                    Format::mxfp4({.rule = MxRule::ocp})};

class MxRows : public testing::TestWithParam<const cpu::Kernels*> {
 protected:
  static constexpr std::int64_t kColumns = 32;  // of a block
  const cpu::Kernels& kernels_ = *GetParam();
  Random random_{seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(seed())};

  // Encodes the row, of an even number of columns, and compares every byte written.
  void expect_row(const Memory& in, DType type, const Format& format) {
    const std::int64_t columns = in.bytes() / bytes_of(type);
    const PartList parts = parts_of(format, columns);
    const bool narrow = format.kind == FormatKind::mxfp4;
    const NumberTable& element = narrow ? NumberTable::e2m1() : NumberTable::e4m3();
    Memory values(parts.part[0].row_bytes, below(random_, 64));
    Memory scales(parts.part[1].wire_bytes, 16 * below(random_, 4));
    kernels_.encode_row(values.data(), scales.data(), in.data(), type, columns, encoding_of(format));
    ASSERT_TRUE(values.guards_intact() && scales.guards_intact()) << columns;
    std::int64_t block = 0;
    for (std::int64_t first = 0; first < columns; first += kColumns, ++block) {
      const std::int64_t count = std::min(kColumns, columns - first);
      std::vector<float> numbers;
      for (std::int64_t c = first; c < first + count; ++c) numbers.push_back(decode(type, in.bits(type, c)));
      const MxBlock expected = encode_mx_block(numbers, element, format.mx.rule);
      ASSERT_EQ(std::to_integer<int>(scales.data()[block]), expected.exponent + 127)
          << to_string(format) << ", block " << block;
      for (std::int64_t c = 0; c < count; ++c) {
        const std::int64_t at = first + c;
        const int byte = std::to_integer<int>(values.data()[narrow ? at / 2 : at]);
        const int code = narrow ? byte >> (at % 2 * 4) & 15 : byte;
        ASSERT_EQ(code, expected.codes[static_cast<std::size_t>(c)])
            << to_string(format) << ", column " << at << " = " << numbers[static_cast<std::size_t>(c)]
            << ", exponent " << expected.exponent;
      }
    }
    for (; block < scales.bytes(); ++block) ASSERT_EQ(std::to_integer<int>(scales.data()[block]), 0);
  }

  void expect_row(const Memory& in, DType type) {
    for (const Format& format : kMxFormats) ASSERT_NO_FATAL_FAILURE(expect_row(in, type, format));
  }

  // Tests a block with `amax` in a random column and element(c) in the others.
  template <class Element>
  void expect_block(DType type, std::uint32_t amax, Element element) {
    Memory in(kColumns * bytes_of(type));
    for (int c = 0; c < kColumns; ++c) in.set_bits(type, c, element(c));
    in.set_bits(type, below(random_, kColumns), amax);
    expect_row(in, type);
  }
};

}  // namespace ferry::test
