// The fp8 code of the dispatch kernels, exhaustively: every byte is compared with the formula on the device.
#include "cuda/fp8/exhaustive.hpp"

#include <gtest/gtest.h>

#include <array>

#include "cuda/fp8/formula.hpp"
#include "cuda/memory/devices.hpp"
#include "format/oracle.hpp"
#include "seed.hpp"

namespace ferry::contract {
namespace {

constexpr std::array kOptions = {Fp8Options{}, Fp8Options{.power_of_two = true},
                                 Fp8Options{.power_of_two = true, .packed = true}};

void expect_equal(const Fp8Comparison& found, unsigned long long values) {
  EXPECT_GE(found.values, values);
  EXPECT_EQ(found.mismatches, 0u) << std::hex << "amax " << found.amax << ", input " << found.input
                                  << ": got " << found.got << ", expected " << found.expected;
}

// The number of pairs of amax and value: twice the magnitudes up to amax, for every amax.
unsigned long long pairs(unsigned long long infinity) {
  return (infinity + 1) * (infinity + 2);
}

TEST(CudaFp8, Every16BitValueWithEveryAmax) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  for (const Fp8Options& options : kOptions) {
    for (const bool whole_rows : {false, true}) {
      SCOPED_TRACE(to_string(Format::fp8_e4m3(options)) + (whole_rows ? ", whole rows" : ""));
      expect_equal(compare_16_bit(DType::bf16, options, whole_rows), pairs(0x7F80));
      expect_equal(compare_16_bit(DType::fp16, options, whole_rows), pairs(0x7C00));
    }
  }
}

TEST(CudaFp8, RandomFp32Values) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(test::seed()));
  for (const Fp8Options& options : kOptions) {
    SCOPED_TRACE(to_string(Format::fp8_e4m3(options)));
    expect_equal(compare_random_fp32(test::seed(), 1ll << 28, options), 1ull << 28);
  }
}

TEST(CudaFp8, Fp32ValuesNextToEveryBoundary) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(test::seed()));
  for (const Fp8Options& options : kOptions) {
    SCOPED_TRACE(to_string(Format::fp8_e4m3(options)));
    expect_equal(compare_boundaries_fp32(test::seed(), options), 255ull * 64 * 2 * 126 * 5);
  }
}

// The formula of this folder, which also compiles for the device, and that of tests/format, which rounds by a
// table.
TEST(CudaFp8, TheFormulaIsTheOracles) {
  for (std::uint32_t word = 0; word < 0x10000; ++word) {
    for (const std::uint32_t below : {0u, 1u, 0x8000u, 0xFFFFu}) {
      const float value = fp32_of(word << 16 | below);
      ASSERT_EQ(e4m3_of(value), test::NumberTable::e4m3().encode(value)) << value;
      if (!(value >= 0)) continue;
      for (const bool power_of_two : {false, true}) {
        const Fp8Formula formula = Fp8Formula::of(value, power_of_two);
        const test::Fp8Block block = test::encode_fp8_block({value, value / 3}, power_of_two);
        ASSERT_EQ(fp32_bits(formula.scale), fp32_bits(block.scale)) << value;
        ASSERT_EQ(formula.quantise(value), block.values[0]) << value;
        ASSERT_EQ(formula.quantise(value / 3), block.values[1]) << value;
        if (power_of_two) {
          ASSERT_EQ(formula.biased_exponent(), block.exponent) << value;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::contract
