// Quantises blocks to e4m3 with every 16-bit value as the largest element, and as any other element.
#include "format/fp8_rows.hpp"

namespace ferry::test {
namespace {

using AllFp8 = Fp8Rows;

INSTANTIATE_TEST_SUITE_P(Isa, AllFp8, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST_P(AllFp8, Every16BitValueAsAmax) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t amax = 0; amax < 65536; ++amax) {
      const auto element = [&](int) { return bits_up_to(random_, amax); };
      ASSERT_NO_FATAL_FAILURE(expect_block(type, amax, element))
          << to_string(type) << " " << std::hex << amax;
    }
  }
}

TEST_P(AllFp8, Every16BitValueAsElement) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    std::vector<std::uint32_t> largest{0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00,
                                       0x3F80, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80};
    for (int i = 0; i < 22; ++i) largest.push_back(static_cast<std::uint32_t>(below(random_, 0x8000)));
    for (const std::uint32_t amax : largest) {
      for (std::uint32_t first = 0; first < 65536; first += 128) {
        const auto element = [&](int c) { return first + static_cast<std::uint32_t>(c); };
        ASSERT_NO_FATAL_FAILURE(expect_block(type, amax, element))
            << to_string(type) << " " << std::hex << amax;
      }
    }
  }
}

}  // namespace
}  // namespace ferry::test
