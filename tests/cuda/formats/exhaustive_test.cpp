// The code of the dispatch kernels for quantised formats, exhaustively: every byte is compared with the
// formulas on the device. A test takes seconds at most.
#include "cuda/formats/exhaustive.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>

#include "cuda/formats/formula.hpp"
#include "cuda/memory/devices.hpp"
#include "format/quantised_rows.hpp"
#include "oracle/numbers.hpp"
#include "seed.hpp"

namespace ferry::contract {
namespace {

using Names = std::vector<const char*>;
const Names kFp8Formats = {"fp8", "fp8-pow2", "fp8-pow2-packed"},
            kMxFormats = {"mxfp8-up", "mxfp8-ocp", "mxfp4-up", "mxfp4-ocp"};
constexpr std::array kWays = {RowWay::plain, RowWay::streamed};

void expect_equal(const FormatComparison& found, unsigned long long values) {
  EXPECT_GE(found.values, values);
  EXPECT_EQ(found.mismatches, 0u) << std::hex << "amax " << found.amax << ", input " << found.input
                                  << ": got " << found.got << ", expected " << found.expected;
}

// Compares at least all pairs of amax and value: twice the magnitudes up to amax, for every amax.
void expect_16_bit(DType type, const Format& format, RowWay way, float g = 1) {
  SCOPED_TRACE(testing::Message() << to_string(format) << ", " << to_string(type) << ", "
                                  << static_cast<int>(way) << ", g = " << g);
  const unsigned long long infinity = type == DType::bf16 ? 0x7F80 : 0x7C00;
  expect_equal(compare_16_bit(type, format, way, g), (infinity + 1) * (infinity + 2));
}

void expect_16_bit(const Names& formats) {
  for (const char* name : formats) {
    for (const DType type : {DType::bf16, DType::fp16}) {
      for (const RowWay way : kWays) expect_16_bit(type, parse_format(name), way);
    }
  }
}

void expect_random(const Format& format, float g = 1) {
  SCOPED_TRACE(testing::Message() << to_string(format) << ", g = " << g << ", FERRY_SEED=" << test::seed());
  expect_equal(compare_random(test::seed(), 1ll << 28, format, g), 1ull << 28);
}

void expect_boundaries(const Format& format, float g = 1) {
  SCOPED_TRACE(testing::Message() << to_string(format) << ", g = " << g << ", FERRY_SEED=" << test::seed());
  const bool narrow = encoding_of(format).element == ElementType::e2m1;
  expect_equal(compare_boundaries(test::seed(), format, g), 255ull * 64 * 2 * (narrow ? 7 : 126) * 5);
}

TEST(CudaFp8, Every16BitValueWithEveryAmax) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  expect_16_bit(kFp8Formats);
}

TEST(CudaFp8, RandomFp32Values) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  for (const char* name : kFp8Formats) expect_random(parse_format(name));
}

TEST(CudaFp8, Fp32ValuesNextToEveryBoundary) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  for (const char* name : kFp8Formats) expect_boundaries(parse_format(name));
}

TEST(CudaMicroscaled, Every16BitValueWithEveryAmax) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  expect_16_bit(kMxFormats);
}

TEST(CudaMicroscaled, RandomFp32Values) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  for (const char* name : kMxFormats) expect_random(parse_format(name));
  for (const float g : {1.0f, 0.37f}) expect_random(Format::nvfp4(), g);
}

TEST(CudaMicroscaled, Fp32ValuesNextToEveryBoundary) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  for (const char* name : kMxFormats) expect_boundaries(parse_format(name));
}

// nvfp4 with a quarter of the global scales, and one of which no scale can be formed.
class CudaNvfp4 : public testing::TestWithParam<int> {
 protected:
  static constexpr int kParts = 4;

  template <class Each>
  static void for_each_scale(Each each) {
    std::vector<float> scales = test::global_scales();
    scales.push_back(0);
    for (std::size_t i = static_cast<std::size_t>(GetParam()); i < scales.size(); i += kParts)
      each(scales[i]);
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
        expect_16_bit(type, Format::nvfp4(), way, g);
      }
    }
    first = false;
  });
}

TEST_P(CudaNvfp4, Fp32ValuesNextToEveryBoundary) {
  FERRY_SKIP_WITHOUT_DEVICES(1);
  for_each_scale([](float g) { expect_boundaries(Format::nvfp4(), g); });
}

INSTANTIATE_TEST_SUITE_P(Scales, CudaNvfp4, testing::Range(0, 4));

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

// No GPU.
TEST(CudaFp8, TheFormulaIsTheOracles) {
  for (std::uint32_t word = 0; word < 0x10000; ++word) {
    for (const std::uint32_t below : {0u, 1u, 0x8000u, 0xFFFFu}) {
      const float value = fp32_of(word << 16 | below);
      ASSERT_EQ(e4m3_of(value), oracle::e4m3(value)) << value;
      if (!(value >= 0)) continue;
      for (const char* name : kFp8Formats) {
        const Format format = parse_format(name);
        const Fp8Formula formula = Fp8Formula::of(value, format.fp8.power_of_two, format.fp8.packed);
        const auto parts = oracle::encoded_row({value, value / 3}, format);
        std::uint32_t scale = 0;
        std::memcpy(&scale, parts[1].data(), sizeof scale);
        ASSERT_EQ(formula.stored(), scale) << name << ": " << value;
        ASSERT_EQ(std::byte{formula.code(value)}, parts[0][0]) << name << ": " << value;
        ASSERT_EQ(std::byte{formula.code(value / 3)}, parts[0][1]) << name << ": " << value;
      }
    }
  }
}

}  // namespace
}  // namespace ferry::contract
