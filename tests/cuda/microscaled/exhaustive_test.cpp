// The code of the dispatch kernels for the microscaled formats, exhaustively: every byte is compared with the
// formulas on the device. A test takes seconds at most.
#include "cuda/microscaled/exhaustive.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "cuda/memory/devices.hpp"
#include "cuda/microscaled/formula.hpp"
#include "format/quantised_rows.hpp"
#include "seed.hpp"

namespace ferry::contract {
namespace {

constexpr std::array kMxFormats = {"mxfp8-up", "mxfp8-ocp", "mxfp4-up", "mxfp4-ocp"};
constexpr std::array kWays = {RowWay::plain, RowWay::streamed};

void expect_equal(const MicroscaledComparison& found, unsigned long long values) {
  EXPECT_GE(found.values, values);
  EXPECT_EQ(found.mismatches, 0u) << std::hex << "amax " << found.amax << ", input " << found.input
                                  << ": got " << found.got << ", expected " << found.expected;
}

// The number of pairs of amax and value: twice the magnitudes up to amax, for every amax.
unsigned long long pairs(DType type) {
  const unsigned long long infinity = type == DType::bf16 ? 0x7F80 : 0x7C00;
  return (infinity + 1) * (infinity + 2);
}

TEST(CudaMicroscaled, Every16BitValueWithEveryAmax) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  for (const char* name : kMxFormats) {
    for (const DType type : {DType::bf16, DType::fp16}) {
      for (const RowWay way : kWays) {
        SCOPED_TRACE(testing::Message() << name << ", " << to_string(type) << ", " << static_cast<int>(way));
        expect_equal(compare_microscaled_16_bit(type, parse_format(name), way), pairs(type));
      }
    }
  }
}

// nvfp4 with 16 of the 64 global scales.
class CudaNvfp4 : public testing::TestWithParam<int> {
 protected:
  static constexpr int kParts = 4;

  template <class Each>
  static void for_each_scale(Each each) {
    const std::vector<float> scales = test::global_scales();
    for (std::size_t i = static_cast<std::size_t>(GetParam()); i < scales.size(); i += kParts) {
      SCOPED_TRACE(testing::Message() << "g = " << scales[i]);
      each(scales[i]);
    }
  }
};

TEST_P(CudaNvfp4, Every16BitValueWithEveryAmax) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  bool first = true;
  for_each_scale([&](float g) {
    // Divisions take their time, so scales beside the first are tried in the kernels' commonest case.
    for (const DType type : {DType::bf16, DType::fp16}) {
      for (const RowWay way : kWays) {
        if (!first && (type != DType::bf16 || way != RowWay::streamed)) continue;
        expect_equal(compare_microscaled_16_bit(type, Format::nvfp4(), way, g), pairs(type));
      }
    }
    first = false;
  });
}

TEST_P(CudaNvfp4, Fp32ValuesNextToEveryBoundary) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(test::seed()));
  for_each_scale([&](float g) {
    expect_equal(compare_microscaled_boundaries(test::seed(), Format::nvfp4(), g), 255ull * 32 * 7 * 5);
  });
}

INSTANTIATE_TEST_SUITE_P(Scales, CudaNvfp4, testing::Range(0, 4));

TEST(CudaMicroscaled, RandomFp32Values) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(test::seed()));
  for (const char* name : kMxFormats) {
    SCOPED_TRACE(name);
    expect_equal(compare_microscaled_random(test::seed(), 1ll << 28, parse_format(name)), 1ull << 28);
  }
  for (const float g : {1.0f, 0.37f}) {
    SCOPED_TRACE(testing::Message() << "nvfp4, g = " << g);
    expect_equal(compare_microscaled_random(test::seed(), 1ll << 28, Format::nvfp4(), g), 1ull << 28);
  }
}

TEST(CudaMicroscaled, Fp32ValuesNextToEveryBoundary) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(test::seed()));
  for (const char* name : kMxFormats) {
    SCOPED_TRACE(name);
    expect_equal(compare_microscaled_boundaries(test::seed(), parse_format(name)), 255ull * 32 * 7 * 5);
  }
}

// The formulas of this folder, which also compile for the device, and those of the oracle. No GPU.
TEST(CudaMicroscaled, TheFormulasAreTheOracles) {
  const std::vector<float> scales = test::global_scales();
  for (std::uint32_t word = 0; word < 0x8000; ++word) {
    for (const std::uint32_t below : {0u, 1u, 0x8000u, 0xFFFFu}) {
      const float amax = fp32_of(word << 16 | below);
      if (std::isnan(amax)) continue;
      const float values[] = {amax, -amax, amax / 3, -amax / 7, amax * 0.24f, 0.0f, -0.0f, NAN};
      for (const bool narrow : {false, true}) {
        const auto element = narrow ? oracle::Element::e2m1 : oracle::Element::e4m3;
        for (const bool up : {false, true}) {
          const MxFormula formula = MxFormula::of(amax, narrow, up);
          const int exponent = oracle::mx_exponent(amax, element, up ? MxRule::up : MxRule::ocp);
          ASSERT_EQ(formula.exponent, exponent) << amax;
          for (const float value : values)
            ASSERT_EQ(formula.code(value), oracle::encode_element(element, value, exponent)) << value;
        }
      }
      const float g = scales[(word * 4 + below % 7) % scales.size()];
      const Nvfp4Formula formula = Nvfp4Formula::of(amax, g);
      const oracle::Nvfp4BlockScale scale = oracle::nvfp4_block_scale(amax, g);
      ASSERT_EQ(formula.scale, scale.stored) << amax << ", g = " << g;
      ASSERT_EQ(formula.divisor, scale.divisor) << amax << ", g = " << g;
      for (const float value : values)
        ASSERT_EQ(formula.code(value), oracle::nvfp4_code(value, scale.divisor)) << value << ", g = " << g;
    }
  }
}

}  // namespace
}  // namespace ferry::contract
