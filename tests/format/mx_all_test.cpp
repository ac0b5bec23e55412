// The MX formats: every 16-bit value with every scale and as the largest of a block, every fp32 value at
// which a code changes, and random fp32 values.
#include <cmath>
#include <cstring>
#include <vector>

#include "format/blocks.hpp"
#include "format/mx_rows.hpp"
#include "format/numbers.hpp"

namespace ferry::test {
namespace {

using AllMx = MxRows;

INSTANTIATE_TEST_SUITE_P(Isa, AllMx, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

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

TEST_P(AllMx, Every16BitValueAsAmax) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t amax = 0; amax < 65536; ++amax) {
      const auto element = [&](int) { return bits_up_to(random_, amax); };
      ASSERT_NO_FATAL_FAILURE(expect_block(type, amax, element))
          << to_string(type) << " " << std::hex << amax;
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
          if (row.size() % kColumns == 0) row.push_back(amax);
          row.push_back(random_() % 2 == 0 ? value : -value);
        }
      }
      row.resize((row.size() + 1) / 2 * 2);
      Memory in(static_cast<std::int64_t>(row.size() * sizeof(float)));
      std::memcpy(in.data(), row.data(), row.size() * sizeof(float));
      ASSERT_NO_FATAL_FAILURE(expect_row(in, DType::fp32)) << "exponent " << exponent;
    }
  }
}

TEST_P(AllMx, RandomFp32) {
  ASSERT_NO_FATAL_FAILURE(expect_random_fp32(1 << 22));
}

}  // namespace
}  // namespace ferry::test
