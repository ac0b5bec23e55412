// The MX formats' elements: every 16-bit value with every scale, and blocks with every 16-bit value as the
// largest.
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"
#include "format/mx_block.hpp"
#include "format/mx_rows.hpp"

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
        const double exact = std::ldexp(static_cast<double>(value), -exponent);
        ASSERT_EQ(fp32_to_e4m3(scaled), NumberTable::e4m3().encode(exact)) << value << " 2^" << exponent;
        ASSERT_EQ(fp32_to_e2m1(scaled), NumberTable::e2m1().encode(exact)) << value << " 2^" << exponent;
      }
    }
  }
}

TEST_P(AllMx, Every16BitValueAsAmax) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t amax = 0; amax < 65536; ++amax) {
      const std::uint32_t magnitude = amax & 0x7FFF;
      // Random values of at most this magnitude, of both signs.
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

}  // namespace
}  // namespace ferry::test
