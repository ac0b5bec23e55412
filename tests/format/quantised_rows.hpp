// Rows of quantised formats, and what the oracle makes of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/blocks.hpp"
#include "format/oracle.hpp"
#include "format/parts.hpp"
#include "format/support.hpp"
#include "oracle/block_formats.hpp"
#include "oracle/encode.hpp"

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

// Formats whose rows have blocks of as many columns.
struct Family {
  const char* name;
  std::int64_t block;
  std::vector<Format> formats;
};

inline const Family kFp8{
    "fp8", 128, {parse_format("fp8"), parse_format("fp8-pow2"), parse_format("fp8-pow2-packed")}};
inline const Family kMx{"mx",
                        oracle::kMxColumns,
                        {parse_format("mxfp8-up"), parse_format("mxfp8-ocp"), parse_format("mxfp4-up"),
                         parse_format("mxfp4-ocp")}};
inline const Family kNvfp4{
    "nvfp4", oracle::kNvfp4Columns, {parse_format("nvfp4"), parse_format("nvfp4-token")}};

// Encodes rows with the kernels of each processor, to the formats of a family, and compares every byte with
// the oracle.
class QuantisedRows : public testing::TestWithParam<std::tuple<const cpu::Kernels*, const Family*>> {
 protected:
  const cpu::Kernels& kernels_ = *std::get<0>(GetParam());
  const Family& family_ = *std::get<1>(GetParam());
  Random random_{seed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "FERRY_SEED=" + std::to_string(seed())};

  // Encodes the row, of an even number of columns if a code is half a byte, and compares every byte written,
  // and whether every scale could be formed.
  void expect_row(const Memory& in, DType type, const std::vector<float>& numbers, const Format& format,
                  float g) {
    const std::int64_t columns = in.bytes() / bytes_of(type);
    const PartList parts = parts_of(format, columns);
    Memory values(parts.part[0].row_bytes, below(random_, 64));
    Memory scales(parts.part[1].wire_bytes, 16 * below(random_, 4));
    Memory row_scale(4);
    const bool valid = kernels_.encode_row({values.data(), scales.data(), row_scale.data()}, in.data(), type,
                                           columns, encoding_of(format), g);
    ASSERT_TRUE(values.guards_intact() && scales.guards_intact() && row_scale.guards_intact()) << columns;
    std::vector<std::vector<std::byte>> expected = oracle::encoded_row(numbers, format, g);
    const bool formed =
        format.kind != FormatKind::nvfp4 || std::ranges::count(expected[1], std::byte{0x7F}) == 0;
    EXPECT_EQ(valid, formed) << "g " << g;
    expected[1].resize(static_cast<std::size_t>(scales.bytes()));  // padded with 0
    const auto expect_part = [&](const Memory& got, int part) {
      const std::vector<std::byte>& want = expected[static_cast<std::size_t>(part)];
      ASSERT_EQ(got.bytes(), std::ssize(want));
      if (std::memcmp(got.data(), want.data(), want.size()) == 0) return;
      for (std::size_t at = 0; at < want.size(); ++at)
        ASSERT_EQ(got.data()[at], want[at])
            << to_string(format) << ", g " << g << ", part " << part << ", byte " << at;
    };
    ASSERT_NO_FATAL_FAILURE(expect_part(scales, 1));
    ASSERT_NO_FATAL_FAILURE(expect_part(values, 0));
    if (parts.count > 2) expect_part(row_scale, 2);
  }

  // In every format of the family: nvfp4 with a scale of the list, with one near that of the row, and per
  // token.
  void expect_row(const Memory& in, DType type) {
    static const std::vector<float> listed = global_scales();
    std::vector<float> numbers;
    for (std::int64_t c = 0; c < in.bytes() / bytes_of(type); ++c)
      numbers.push_back(decode(type, in.bits(type, c)));
    for (const Format& format : family_.formats)
      ASSERT_NO_FATAL_FAILURE(expect_row(
          in, type, numbers, format, listed[static_cast<std::size_t>(below(random_, std::ssize(listed)))]));
    if (&family_ != &kNvfp4) return;
    const float near = std::ldexp(oracle::nvfp4_row_scale(numbers), static_cast<int>(below(random_, 9)) - 4);
    ASSERT_NO_FATAL_FAILURE(expect_row(in, type, numbers, Format::nvfp4(), near));
  }
  void expect_row(const std::vector<float>& row, const Format& format, float g = 1) {
    Memory in(static_cast<std::int64_t>(row.size() * sizeof(float)));
    std::memcpy(in.data(), row.data(), row.size() * sizeof(float));
    expect_row(in, DType::fp32, row, format, g);
  }

  // Tests a block with `amax` in a random column and element(c) in the others.
  template <class Element>
  void expect_block(DType type, std::uint32_t amax, Element element) {
    Memory in(family_.block * bytes_of(type));
    for (int c = 0; c < family_.block; ++c) in.set_bits(type, c, element(c));
    in.set_bits(type, below(random_, family_.block), amax);
    expect_row(in, type);
  }

  // Rows of random fp32 values, `total` together: each block, or each row, of any magnitude, its values
  // within 2^-15 of it; some zeros, denormals, infinities and NaN.
  void expect_random_fp32(std::int64_t total) {
    constexpr std::int64_t kRow = 4096;
    Memory in(kRow * bytes_of(DType::fp32));
    for (std::int64_t done = 0; done < total; done += 2 * kRow) {
      for (const std::int64_t columns : {family_.block, kRow}) {
        fill_blocks(random_, columns, in);
        ASSERT_NO_FATAL_FAILURE(expect_row(in, DType::fp32)) << "values from " << done;
      }
    }
  }
};

// The instances of a suite of QuantisedRows.
inline auto quantised_rows(const std::vector<const Family*>& families = {&kFp8, &kMx, &kNvfp4}) {
  return testing::Combine(testing::ValuesIn(cpu::available_kernels()), testing::ValuesIn(families));
}
inline std::string name_of_rows(const testing::TestParamInfo<QuantisedRows::ParamType>& instance) {
  return std::string(std::get<1>(instance.param)->name) + "_" + std::get<0>(instance.param)->name;
}

}  // namespace ferry::test
