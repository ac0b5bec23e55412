// Conversions of all values of the MX formats and NVFP4 that take minutes.
#include "format/quantised_rows.hpp"

namespace ferry::test {
namespace {

// ---- The MX formats: many more random fp32 values.

using LongMx = MxRows;

INSTANTIATE_TEST_SUITE_P(Isa, LongMx, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST_P(LongMx, RandomFp32) {
  ASSERT_NO_FATAL_FAILURE(expect_random_fp32(1 << 28));
}

// ---- NVFP4: every 16-bit value with every scale and all global scales, and many more random fp32 values.

using LongNvfp4 = Nvfp4Rows;

INSTANTIATE_TEST_SUITE_P(Isa, LongNvfp4, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST(LongNvfp4Codes, Every16BitValueWithEveryScaleAndGlobalScale) {
  for (const float g : global_scales()) {
    for (const DType type : {DType::bf16, DType::fp16}) ASSERT_NO_FATAL_FAILURE(expect_every_code(type, g));
  }
}

TEST_P(LongNvfp4, RandomFp32) {
  ASSERT_NO_FATAL_FAILURE(expect_random_fp32(1 << 28));
}

}  // namespace
}  // namespace ferry::test
