// Encodes rows to NVFP4 and compares every byte with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/blocks.hpp"
#include "format/expect_bytes.hpp"
#include "format/oracle.hpp"
#include "format/parts.hpp"
#include "format/support.hpp"
#include "oracle/block_formats.hpp"

namespace ferry::test {

// 64 global scales: the ends of the fp32 range, denormals, and fractions in which products are and are not
// exact.
inline std::vector<float> global_scales() {
  std::vector<float> scales{0x1p-149f, 0x1p-148f, 0x1.8p-148f,      0x1p-130f,  0x1.FFFFFCp-127f, 0x1p-126f,
                            0x1p127f,  0x1p-9f,   0x1.FFFFFEp127f,  0.1f,       1.0f / 3,         1.0f / 448,
                            1.0f / 6,  3.0f,      0x1.24924ap-118f, 1.0f / 2688};
  for (int exponent = -124; exponent < 124; exponent += 16) {
    for (const float fraction : {1.0f, 0x1.000002p0f, 0x1.FFFFFEp0f})
      scales.push_back(std::ldexp(fraction, exponent));
  }
  return scales;
}

// Every 16-bit value divided by what every scale and g make.
inline void expect_every_code(DType type, float g) {
  for (std::uint8_t s = 0; s < 0x7F; ++s) {
    const float divisor = oracle::fp32_product(oracle::decode_element(oracle::Element::e4m3, s), g);
    if (std::isinf(divisor)) break;
    const Nvfp4Scale scale{s, divisor};
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      const float value = decode(type, bits);
      ASSERT_EQ(scale.code(value), oracle::nvfp4_code(value, divisor))
          << value << " / " << divisor << ", g " << g;
    }
  }
}

class Nvfp4Rows : public testing::TestWithParam<const cpu::Kernels*> {
 protected:
  static constexpr std::int64_t kColumns = oracle::kNvfp4Columns;
  const cpu::Kernels& kernels_ = *GetParam();
  Random random_{seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(seed())};

  // Encodes the row, of an even number of columns, with `g` or with a scale of its own, and compares every
  // byte written, and whether every scale could be formed.
  void expect_row(const Memory& in, DType type, float g, bool per_token = false) {
    const std::int64_t columns = in.bytes() / bytes_of(type);
    const Format format = Format::nvfp4({.per_token = per_token});
    const PartList parts = parts_of(format, columns);
    Memory values(parts.part[0].row_bytes, below(random_, 64));
    Memory scales(parts.part[1].wire_bytes, 16 * below(random_, 4));
    Memory row_scale(4);
    const bool valid = kernels_.encode_row({values.data(), scales.data(), row_scale.data()}, in.data(), type,
                                           columns, encoding_of(format), g);
    ASSERT_TRUE(values.guards_intact() && scales.guards_intact() && row_scale.guards_intact()) << columns;
    std::vector<float> numbers;
    for (std::int64_t c = 0; c < columns; ++c) numbers.push_back(decode(type, in.bits(type, c)));
    oracle::BlockRow expected =
        oracle::encode_nvfp4(numbers, per_token ? oracle::nvfp4_row_scale(numbers) : g);
    bool formed = true;
    for (const std::uint8_t scale : expected.scales) formed = formed && scale != 0x7F;
    EXPECT_EQ(valid, formed) << "g " << expected.row_scale;
    expected.scales.resize(static_cast<std::size_t>(scales.bytes()));  // padded with 0
    ASSERT_NO_FATAL_FAILURE(expect_bytes(scales, expected.scales)) << "scales, g " << expected.row_scale;
    ASSERT_NO_FATAL_FAILURE(expect_bytes(values, expected.values)) << "values, g " << expected.row_scale;
    if (per_token) {
      ASSERT_EQ(row_scale.fp32(0), expected.row_scale);
    }
  }

  void expect_row(const std::vector<float>& row, float g) {
    Memory in(static_cast<std::int64_t>(row.size() * sizeof(float)));
    std::memcpy(in.data(), row.data(), row.size() * sizeof(float));
    expect_row(in, DType::fp32, g);
  }

  // Rows of random fp32 values, `total` together, whose blocks are of any magnitude: with random scales from
  // the list, which most blocks lie above or below, with scales near the row, and per token.
  void expect_random_fp32(std::int64_t total) {
    constexpr std::int64_t kRow = 4096;
    const std::vector<float> list = global_scales();
    Memory wide(kRow * bytes_of(DType::fp32)), near(kRow * bytes_of(DType::fp32));
    for (std::int64_t done = 0; done < total; done += 2 * kRow) {
      fill_blocks(random_, kColumns, wide);
      fill_blocks(random_, kRow, near);
      const float listed = list[static_cast<std::size_t>(below(random_, std::ssize(list)))];
      std::vector<float> numbers;
      for (std::int64_t c = 0; c < kRow; ++c) numbers.push_back(near.fp32(c));
      const float own = oracle::nvfp4_row_scale(numbers);
      ASSERT_NO_FATAL_FAILURE(expect_row(wide, DType::fp32, listed)) << "values from " << done;
      ASSERT_NO_FATAL_FAILURE(expect_row(near, DType::fp32, own)) << "values from " << done;
      ASSERT_NO_FATAL_FAILURE(expect_row(near, DType::fp32, 0, true)) << "values from " << done;
    }
  }
};

}  // namespace ferry::test
