// The MX formats: many more random fp32 values.
#include "format/mx_rows.hpp"

namespace ferry::test {
namespace {

using LongMx = MxRows;

INSTANTIATE_TEST_SUITE_P(Isa, LongMx, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST_P(LongMx, RandomFp32) {
  ASSERT_NO_FATAL_FAILURE(expect_random_fp32(1 << 28));
}

}  // namespace
}  // namespace ferry::test
