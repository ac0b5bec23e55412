// Encodes rows to the MX formats and compares every byte with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/expect_bytes.hpp"
#include "format/oracle.hpp"
#include "format/parts.hpp"
#include "format/support.hpp"
#include "oracle/block_formats.hpp"

namespace ferry::test {

inline const Format kMxFormats[] = {Format::mxfp8({.rule = MxRule::up}), Format::mxfp8({.rule = MxRule::ocp}),
                                    Format::mxfp4({.rule = MxRule::up}),
                                    Format::mxfp4({.rule = MxRule::ocp})};

class MxRows : public testing::TestWithParam<const cpu::Kernels*> {
 protected:
  static constexpr std::int64_t kColumns = oracle::kMxColumns;
  const cpu::Kernels& kernels_ = *GetParam();
  Random random_{seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(seed())};

  // Encodes the row, of an even number of columns, and compares every byte written.
  void expect_row(const Memory& in, DType type, const Format& format) {
    const std::int64_t columns = in.bytes() / bytes_of(type);
    const PartList parts = parts_of(format, columns);
    const oracle::Element element =
        format.kind == FormatKind::mxfp4 ? oracle::Element::e2m1 : oracle::Element::e4m3;
    Memory values(parts.part[0].row_bytes, below(random_, 64));
    Memory scales(parts.part[1].wire_bytes, 16 * below(random_, 4));
    kernels_.encode_row({values.data(), scales.data()}, in.data(), type, columns, encoding_of(format), 1.0f);
    ASSERT_TRUE(values.guards_intact() && scales.guards_intact()) << columns;
    std::vector<float> numbers;
    for (std::int64_t c = 0; c < columns; ++c) numbers.push_back(decode(type, in.bits(type, c)));
    oracle::BlockRow expected = oracle::encode_mx(numbers, element, format.mx.rule);
    expected.scales.resize(static_cast<std::size_t>(scales.bytes()));  // padded with 0
    ASSERT_NO_FATAL_FAILURE(expect_bytes(scales, expected.scales)) << to_string(format) << ", scales";
    ASSERT_NO_FATAL_FAILURE(expect_bytes(values, expected.values)) << to_string(format) << ", values";
  }

  void expect_row(const Memory& in, DType type) {
    for (const Format& format : kMxFormats) ASSERT_NO_FATAL_FAILURE(expect_row(in, type, format));
  }

  // Rows of random fp32 values, `total` together: each block of any magnitude, its values within 2^-15 of it;
  // some zeros, denormals, infinities and NaN.
  void expect_random_fp32(std::int64_t total) {
    constexpr std::int64_t kRow = 4096;
    Memory in(kRow * bytes_of(DType::fp32));
    for (std::int64_t done = 0; done < total; done += kRow) {
      fill_blocks(random_, kColumns, in);
      ASSERT_NO_FATAL_FAILURE(expect_row(in, DType::fp32)) << "values from " << done;
    }
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
