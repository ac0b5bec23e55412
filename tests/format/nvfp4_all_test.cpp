// NVFP4: every 16-bit value as the largest of a block and with every scale, every fp32 value at which a scale
// or a code changes, and random fp32 values.
#include <array>

#include "format/nvfp4_rows.hpp"

namespace ferry::test {
namespace {

using AllNvfp4 = Nvfp4Rows;

INSTANTIATE_TEST_SUITE_P(Isa, AllNvfp4, testing::ValuesIn(cpu::available_kernels()),
                         [](const auto& instance) { return instance.param->name; });

TEST(AllNvfp4Scales, Every16BitValueWithEveryGlobalScale) {
  for (const DType type : {DType::bf16, DType::fp16}) {
    for (std::uint32_t bits = 0; bits < 32768; ++bits) {
      const float amax = decode(type, bits);
      if (std::isnan(amax)) continue;
      const float own = nvfp4_row_scale(std::isinf(amax) ? 0 : amax);
      ASSERT_EQ(own, oracle::nvfp4_row_scale(std::vector<float>{amax})) << amax;
      for (const float g : global_scales()) {
        const Nvfp4Scale scale = nvfp4_scale(amax, g);
        const oracle::Nvfp4BlockScale expected = oracle::nvfp4_block_scale(amax, g);
        ASSERT_EQ(scale.stored, expected.stored) << amax << ", g " << g;
        ASSERT_EQ(scale.divisor, expected.divisor) << amax << ", g " << g;
      }
    }
  }
}

// Four global scales of the list at random: nvfp4_long_test.cpp has all of them.
TEST(AllNvfp4Codes, Every16BitValueWithEveryScale) {
  Random random(seed());
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(seed()));
  const std::vector<float> scales = global_scales();
  for (int i = 0; i < 4; ++i) {
    const float g = scales[static_cast<std::size_t>(below(random, std::ssize(scales)))];
    for (const DType type : {DType::bf16, DType::fp16}) ASSERT_NO_FATAL_FAILURE(expect_every_code(type, g));
  }
}

// Blocks whose t is next to each e4m3 value and each midpoint of two, with values next to every midpoint of
// codes.
TEST_P(AllNvfp4, Fp32BoundariesOfEveryScaleAndCode) {
  std::array<bool, 0x7F> seen{};
  for (const float g : global_scales()) {
    std::vector<float> row;
    for (std::uint8_t s = 1; s < 0x7F; ++s) {
      const double value = oracle::decode_element(oracle::Element::e4m3, s);
      const double below = oracle::decode_element(oracle::Element::e4m3, static_cast<std::uint8_t>(s - 1));
      for (const double t : {value, (value + below) / 2}) {
        float amax = static_cast<float>(6 * t * g);
        if (std::isinf(amax)) continue;
        for (int step = 0; step < 2; ++step) amax = std::nextafter(amax, 0.0f);
        for (int step = -2; step <= 2; ++step, amax = std::nextafter(amax, HUGE_VALF)) {
          const oracle::Nvfp4BlockScale scale = oracle::nvfp4_block_scale(amax, g);
          if (scale.stored != 0x7F) seen[scale.stored] = true;
          row.push_back(amax);
          for (std::uint8_t code = 0; code < 7; ++code) {
            const float middle =
                (oracle::decode_element(oracle::Element::e2m1, code) +
                 oracle::decode_element(oracle::Element::e2m1, static_cast<std::uint8_t>(code + 1))) /
                2;
            const auto at = static_cast<float>(double{middle} * double{scale.divisor});
            const bool up = random_() % 2 == 0;
            for (const float near : {at, std::nextafter(at, up ? HUGE_VALF : 0.0f)})
              row.push_back(std::copysign(std::min(near, amax), random_() % 2 == 0 ? 1.0f : -1.0f));
          }
          row.push_back(0);
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_row(row, g)) << "g " << g;
  }
  for (std::size_t s = 0; s < seen.size(); ++s) EXPECT_TRUE(seen[s]) << "scale " << s;
}

TEST_P(AllNvfp4, RandomFp32) {
  ASSERT_NO_FATAL_FAILURE(expect_random_fp32(1 << 22));
}

}  // namespace
}  // namespace ferry::test
