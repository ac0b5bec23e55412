// Conversions of all values of quantised formats that take minutes.
#include "format/quantised_rows.hpp"

namespace ferry::test {
namespace {

using LongQuantised = QuantisedRows;
INSTANTIATE_TEST_SUITE_P(Formats, LongQuantised, quantised_rows({&kMx, &kNvfp4}), name_of_rows);

TEST_P(LongQuantised, RandomFp32) {
  ASSERT_NO_FATAL_FAILURE(expect_random_fp32(1 << 28));
}

// Every 16-bit value with every scale and all global scales.
TEST(LongNvfp4Codes, Every16BitValueWithEveryScaleAndGlobalScale) {
  for (const float g : global_scales()) {
    for (const DType type : {DType::bf16, DType::fp16}) ASSERT_NO_FATAL_FAILURE(expect_every_code(type, g));
  }
}

}  // namespace
}  // namespace ferry::test
