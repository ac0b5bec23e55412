// The dispatch kernels' code for the microscaled formats: every byte is compared with the oracle.
#include "cuda/microscaled/encode_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "cuda/memory/devices.hpp"
#include "format/encoding.hpp"
#include "format/oracle.hpp"
#include "oracle/block_formats.hpp"
#include "seed.hpp"

namespace ferry::contract {
namespace {

constexpr std::size_t kBlock = 32, kColumns = kMicroscaledColumns;

void expect_rows(const std::vector<std::uint32_t>& rows, DType type, const Format& format, bool whole_rows) {
  const MicroscaledRows got = encode_on_device(rows, type, format, whole_rows);
  const bool narrow = encoding_of(format).element == ElementType::e2m1;
  std::vector<float> numbers;
  for (const std::uint32_t bits : rows) numbers.push_back(test::decode(type, bits));
  const oracle::BlockRow expected =
      oracle::encode_mx(numbers, narrow ? oracle::Element::e2m1 : oracle::Element::e4m3, format.mx.rule);
  for (std::size_t block = 0; block < rows.size() / kBlock; ++block)
    ASSERT_EQ(got.scales[block], expected.scales[block]) << to_string(format) << ", block " << block;
  for (std::size_t at = 0; at < expected.values.size(); ++at)
    ASSERT_EQ(got.values[at], expected.values[at]) << to_string(format) << ", byte " << at;
}

void expect_rows(const std::vector<std::uint32_t>& rows, DType type) {
  for (const char* name : {"mxfp8-up", "mxfp8-ocp", "mxfp4-up", "mxfp4-ocp"}) {
    for (const bool whole_rows : {false, true}) {
      if (whole_rows && type == DType::fp32) continue;
      ASSERT_NO_FATAL_FAILURE(expect_rows(rows, type, parse_format(name), whole_rows)) << to_string(type);
    }
  }
}

void expect_nvfp4_rows(const std::vector<std::uint32_t>& rows, DType type) {
  std::vector<float> numbers;
  for (const std::uint32_t bits : rows) numbers.push_back(test::decode(type, bits));
  for (const float g : {1.0f, 0.37f, 0x1p-126f, 1e-40f, 3e38f, 0.0f}) {
    const bool whole_rows = type != DType::fp32 && g != 1;
    const MicroscaledRows got = encode_on_device(rows, type, Format::nvfp4(), whole_rows, g);
    const oracle::BlockRow expected = oracle::encode_nvfp4(numbers, g);
    for (std::size_t block = 0; block < expected.scales.size(); ++block)
      ASSERT_EQ(got.scales[block], expected.scales[block]) << "g = " << g << ", block " << block;
    for (std::size_t at = 0; at < expected.values.size(); ++at)
      ASSERT_EQ(got.values[at], expected.values[at]) << "g = " << g << ", byte " << at;
  }
}

std::vector<std::uint32_t> whole(std::vector<std::uint32_t> values) {
  values.resize((values.size() + kColumns - 1) / kColumns * kColumns);
  return values;
}

TEST(CudaMicroscaled, Every16BitMagnitudeAsAmax) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  std::mt19937_64 random(test::seed());
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(test::seed()));
  for (const DType type : {DType::bf16, DType::fp16}) {
    std::vector<std::uint32_t> values;
    for (std::uint32_t amax = 0; amax < 0x8000; ++amax) {
      for (std::uint32_t c = 0; c < kBlock; ++c) {
        const auto sign = static_cast<std::uint32_t>(random()) & 0x8000;
        values.push_back((c == amax % kBlock ? amax : static_cast<std::uint32_t>(random() % (amax + 1))) |
                         sign);
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_rows(whole(values), type));
    ASSERT_NO_FATAL_FAILURE(expect_nvfp4_rows(whole(values), type)) << to_string(type);
  }
}

// Values from the largest of a block down to where every element becomes 0, for every exponent of fp32.
TEST(CudaMicroscaled, Fp32BlocksOfEveryExponent) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  std::mt19937_64 random(test::seed());
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(test::seed()));
  std::vector<std::uint32_t> values;
  for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (const std::uint32_t fraction :
         {0u, 0x3FFFFFu, 0x400000u, 0x400001u, 0x600000u, 0x600001u, 0x7FFFFFu}) {
      for (int repeat = 0; repeat < 32; ++repeat) {
        const auto at = random() % kBlock;
        for (std::uint32_t c = 0; c < kBlock; ++c) {
          const auto word = static_cast<std::uint32_t>(random());
          const std::uint32_t lower = exponent - std::min<std::uint32_t>(exponent, word >> 8 & 15);
          const std::uint32_t near = lower << 23 | (word & 1 ? fraction : word & 0x7FFFFF);
          const std::uint32_t bits = exponent << 23 | fraction;
          values.push_back((c == at ? bits : std::min(near, bits)) | (word & 0x80000000u));
        }
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(expect_rows(whole(values), DType::fp32));
  ASSERT_NO_FATAL_FAILURE(expect_nvfp4_rows(whole(values), DType::fp32));
}

}  // namespace
}  // namespace ferry::contract
