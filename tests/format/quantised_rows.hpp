// Rows of quantised formats, and what the oracle makes of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/blocks.hpp"
#include "format/oracle.hpp"
#include "format/parts.hpp"
#include "format/support.hpp"
#include "oracle/block_formats.hpp"

namespace ferry::test {

// ---- Compares the bytes that a codec wrote with those of the oracle.

inline void expect_bytes(const Memory& got, const std::vector<std::uint8_t>& expected) {
  ASSERT_EQ(got.bytes(), static_cast<std::int64_t>(expected.size()));
  for (std::size_t at = 0; at < expected.size(); ++at)
    ASSERT_EQ(std::to_integer<int>(got.data()[at]), expected[at]) << "byte " << at;
}

// ---- Encodes rows to fp8 with all options and compares every byte with the formula, computed in double.

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

// ---- Encodes rows to the MX formats and compares every byte with the oracle.

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

// ---- Encodes rows to NVFP4 and compares every byte with the oracle.

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
