// The kernels' way to NVFP4, run on the host: thresholds in place of quotients for bf16, quotients without
// divisions otherwise, and whole rows against the oracle.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/dispatch/send_nvfp4.cuh"
#include "kernels_on_host/grid.hpp"
#include "oracle/block_formats.hpp"
#include "oracle/numbers.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

// Scales for which usual() holds, both ends included.
std::vector<float> usual_scales() {
  std::vector<float> scales{1.0f, 0.1f, 1.0f / 3, 1.0f / 448, 1.0f / 6, 3.0f, 1.0f / 2688, 0.37f, 448.0f};
  for (const int exponent : {-60, -59, -33, -15, -8, 7, 20, 59, 60}) {
    for (const float fraction : {1.0f, 0x1.000002p0f, 0x1.FFFFFEp0f, 0x1.24924ap0f}) {
      const float g = std::ldexp(fraction, exponent);
      if (g <= 0x1p60f) scales.push_back(g);
    }
  }
  return scales;
}

// Each threshold is the first value of bf16 that has its code: so its own code is high enough, and that of
// the value before is not.
void expect_thresholds(float d) {
  const Bf16Thresholds thresholds = Bf16Thresholds::of(d);
  const Nvfp4Scale scale{1, d};
  for (int i = 0; i < 7; ++i) {
    const std::uint32_t word = thresholds.negated[i];
    ASSERT_EQ(word >> 16, word & 0xFFFF) << d;
    ASSERT_NE(word & 0x8000, 0u) << d;
    const auto bits = static_cast<std::uint16_t>(word & 0x7FFF);
    ASSERT_GT(scale.code(bf16_value(bits)), i) << d << ", threshold " << i;
    ASSERT_LE(scale.code(bf16_value(static_cast<std::uint16_t>(bits - 1))), i) << d << ", threshold " << i;
  }
}

TEST(Nvfp4Blocks, ThresholdsOfEveryFraction) {
  for (std::uint32_t fraction = 0; fraction < 1u << 23; ++fraction)
    ASSERT_NO_FATAL_FAILURE(expect_thresholds(float_of(127u << 23 | fraction)));
}

TEST(Nvfp4Blocks, ThresholdsOfEveryScale) {
  for (const float g : usual_scales()) {
    ASSERT_TRUE(Nvfp4Global::of(g).usual()) << g;
    for (std::uint8_t s = 1; s < 0x7F; ++s)
      ASSERT_NO_FATAL_FAILURE(expect_thresholds(e4m3_to_fp32(s) * g)) << "g " << g;
  }
}

// Every bf16 value beside every other, by thresholds of every s.
TEST(Nvfp4Blocks, EveryBf16ValueByThresholds) {
  for (const float g : {1.0f, 0.37f, 0x1.FFFFFEp-60f}) {
    for (std::uint8_t s = 1; s < 0x7F; ++s) {
      const Nvfp4Scale scale{s, e4m3_to_fp32(s) * g};
      const Bf16Thresholds thresholds = Bf16Thresholds::of(scale.divisor);
      for (std::uint32_t bits = 0; bits < 65536; bits += 8) {
        const auto two = [bits](std::uint32_t i) { return (bits + i) | (bits + i + 1) << 16; };
        const std::uint32_t codes = eight_by_thresholds({two(0), two(2), two(4), two(6)}, thresholds);
        for (std::uint32_t i = 0; i < 8; ++i)
          ASSERT_EQ(codes >> (4 * i) & 15, scale.code(bf16_value(static_cast<std::uint16_t>(bits + i))))
              << "bits " << bits + i << ", s " << int{s} << ", g " << g;
      }
    }
  }
}

TEST(Nvfp4Blocks, ScalesWithoutDivisions) {
  std::mt19937_64 random(test::seed());
  for (const float g : usual_scales()) {
    const Nvfp4Global global = Nvfp4Global::of(g);
    const auto expect_scale = [&](float amax) {
      const Nvfp4Scale expected = nvfp4_scale(amax, g), got = global.scale_of(amax);
      ASSERT_EQ(got.stored, expected.stored) << "amax " << amax << ", g " << g;
      ASSERT_EQ(got.divisor, expected.divisor) << "amax " << amax << ", g " << g;
    };
    for (std::uint32_t bits = 0; bits <= 0x7F80; ++bits)
      ASSERT_NO_FATAL_FAILURE(expect_scale(bf16_value(static_cast<std::uint16_t>(bits))));
    for (std::uint32_t bits = 0; bits <= 0x7C00; ++bits)
      ASSERT_NO_FATAL_FAILURE(expect_scale(value_of_fp16(static_cast<std::uint16_t>(bits))));
    for (int i = 0; i < 100000; ++i) {
      const float amax = float_of(static_cast<std::uint32_t>(random()) & 0x7FFFFFFF);
      if (amax == amax) ASSERT_NO_FATAL_FAILURE(expect_scale(amax));
      // Next to where the scale changes.
      const float at = (e4m3_to_fp32(static_cast<std::uint8_t>(random() % 0x7E)) +
                        e4m3_to_fp32(static_cast<std::uint8_t>(random() % 0x7E))) /
                       2 * 6 * g;
      for (const float near : {at, std::nextafter(at, 0.0f), std::nextafter(at, INFINITY)})
        ASSERT_NO_FATAL_FAILURE(expect_scale(near));
    }
  }
}

// Next to the values between two scales, for any g.
TEST(Nvfp4Blocks, ScalesWithoutDivisionsForAnyGlobalScale) {
  std::mt19937_64 random(test::seed());
  for (int i = 0; i < 500000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    const float g =
        std::ldexp(float_of(0x3F800000u | (bits & 0x7FFFFF)), static_cast<int>(bits >> 24 & 63) - 32);
    const auto code = static_cast<std::uint8_t>(random() % 0x7E);
    const float between = (e4m3_to_fp32(code) + e4m3_to_fp32(static_cast<std::uint8_t>(code + 1))) / 2;
    const std::uint32_t at = bits_of(between * 6 * g);
    for (std::uint32_t amax = at - 4; amax <= at + 4; ++amax) {
      const Nvfp4Scale expected = nvfp4_scale(float_of(amax), g),
                       got = Nvfp4Global::of(g).scale_of(float_of(amax));
      ASSERT_EQ(got.stored, expected.stored) << "amax " << float_of(amax) << ", g " << g;
      ASSERT_EQ(got.divisor, expected.divisor) << "amax " << float_of(amax) << ", g " << g;
    }
  }
}

struct EncodedRow {
  std::vector<std::uint8_t> values, scales;
  bool valid = true;
};

// Columns [begin, end) of a row, sent to three rows at once, which must be the same.
template <DType kType, int kAtOnce>
EncodedRow encode(const std::vector<uint4>& row, int begin, int end, float g) {
  const auto bytes = static_cast<std::size_t>(end / 2);
  std::vector<std::vector<std::uint64_t>> values(3, std::vector<std::uint64_t>(bytes / 8 + 1, ~0ull));
  std::vector<std::uint32_t> scales(static_cast<std::size_t>(end) / 64 + 2, ~0u);
  EncodedRow got;
  on_host::Grid grid(test::seed());
  grid.add(1, 32, [&](unsigned) {
    const auto thread = static_cast<std::size_t>(threadIdx.x);
    auto* const to = thread < 3 ? reinterpret_cast<std::byte*>(values[thread].data()) : nullptr;
    const bool valid = send_nvfp4<kType, kAtOnce>(
        reinterpret_cast<const std::byte*>(row.data()), {to, 7u}, {begin, end}, g,
        [&](bool stores, std::int64_t offset, std::uint32_t word) {
          if (stores) std::memcpy(reinterpret_cast<std::byte*>(scales.data()) + offset, &word, sizeof word);
        });
    got.valid = got.valid && valid;
  });
  grid.run();
  EXPECT_EQ(values[0], values[1]);
  EXPECT_EQ(values[0], values[2]);
  const auto* const of_values = reinterpret_cast<const std::uint8_t*>(values[0].data());
  const auto* const of_scales = reinterpret_cast<const std::uint8_t*>(scales.data());
  for (int c = 0; c < begin / 2; ++c) EXPECT_EQ(of_values[c], 0xFF) << "before the columns";
  for (int b = 0; b < begin / 16; ++b) EXPECT_EQ(of_scales[b], 0xFF) << "before the columns";
  for (std::size_t c = bytes; c < 8 * values[0].size(); ++c) EXPECT_EQ(of_values[c], 0xFF) << "past the end";
  const int blocks = (end / 16 + 3) / 4 * 4;
  for (std::size_t b = static_cast<std::size_t>(blocks); b < 4 * scales.size(); ++b)
    EXPECT_EQ(of_scales[b], 0xFF) << "past the end";
  got.values.assign(of_values + begin / 2, of_values + end / 2);
  got.scales.assign(of_scales + begin / 16, of_scales + blocks);
  return got;
}

template <DType kType, int kAtOnce>
void expect_row(int begin, int end, float g, std::mt19937_64& random) {
  SCOPED_TRACE(testing::Message() << "type " << static_cast<int>(kType) << ", columns " << begin << " to "
                                  << end << ", g = " << g);
  std::vector<uint4> row(static_cast<std::size_t>(end * value_bytes(kType) / 16));
  std::vector<float> numbers;
  for (int c = 0; c < end; ++c) {
    auto* const at = reinterpret_cast<std::byte*>(row.data()) + c * value_bytes(kType);
    const auto word = static_cast<std::uint32_t>(random());
    float value = std::ldexp(static_cast<float>(static_cast<int>(word % 2001) - 1000), -8) * g * 64;
    if (random() % 16 == 0) std::memcpy(&value, &word, sizeof value);  // any bits
    if (c / 16 % 7 == 3) value = 0;
    oracle::store(kType, value, at);
    if (c >= begin) numbers.push_back(oracle::load(kType, at));
  }
  const EncodedRow got = encode<kType, kAtOnce>(row, begin, end, g);
  oracle::BlockRow expected = oracle::encode_nvfp4(numbers, g);
  bool valid = true;
  for (const std::uint8_t scale : expected.scales) valid = valid && scale != 0x7F;
  expected.scales.resize((expected.scales.size() + 3) / 4 * 4);
  EXPECT_EQ(got.values, expected.values);
  EXPECT_EQ(got.scales, expected.scales);
  EXPECT_EQ(got.valid, valid);
}

TEST(Nvfp4Blocks, RowsAreTheOracles) {
  std::mt19937_64 random(test::seed());
  for (const float g : {1.0f, 0.37f, 3e-5f, 0x1p-61f, 1e-40f, 1e36f, 3e38f, 0.0f, -1.0f, INFINITY, NAN}) {
    for (const auto& [begin, end] : {std::pair{0, 32},
                                     {0, 96},
                                     {0, 512},
                                     {0, 544},
                                     {512, 1056},
                                     {0, 3584},
                                     {2048, 4096},
                                     {3584, 4128}}) {
      ASSERT_NO_FATAL_FAILURE((expect_row<DType::bf16, 4>(begin, end, g, random)));
      ASSERT_NO_FATAL_FAILURE((expect_row<DType::bf16, 2>(begin, end, g, random)));
      ASSERT_NO_FATAL_FAILURE((expect_row<DType::fp16, 4>(begin, end, g, random)));
      ASSERT_NO_FATAL_FAILURE((expect_row<DType::fp16, 2>(begin, end, g, random)));
      ASSERT_NO_FATAL_FAILURE((expect_row<DType::fp32, 1>(begin, end, g, random)));
    }
  }
}

// What a row holds beside finite values of any size.
enum class Special { none, one_infinity, anything, only_nan };

template <DType kType>
std::uint16_t value_with(Special special, bool last, std::mt19937_64& random) {
  constexpr std::uint16_t kInfinity = kType == DType::bf16 ? 0x7F80 : 0x7C00;
  auto bits = static_cast<std::uint16_t>(random());
  const auto is_finite = [&] { return (bits & 0x7FFF) < kInfinity; };
  if (special == Special::only_nan) return static_cast<std::uint16_t>(bits | kInfinity | 1);
  while (special != Special::anything && !is_finite()) bits = static_cast<std::uint16_t>(random());
  if (special == Special::one_infinity && last) return kInfinity | 0x8000;
  return bits;
}

template <DType kType>
void expect_largest_finite(int columns, Special special, std::mt19937_64& random) {
  constexpr int kOfPiece = kStreamPiece / 2;
  std::vector<uint4> row(static_cast<std::size_t>(columns) / 8);
  std::vector<float> numbers;
  for (int c = 0; c < columns; ++c) {
    auto* const bits = reinterpret_cast<std::uint16_t*>(row.data()) + c;
    *bits = value_with<kType>(special, c == columns - 1, random);
    numbers.push_back(oracle::load(kType, reinterpret_cast<const std::byte*>(bits)));
  }
  const auto* const memory = reinterpret_cast<const std::byte*>(row.data());
  float whole = -1, in_pieces = -1;
  on_host::Grid grid(test::seed());
  grid.add(1, 32, [&](unsigned) {
    whole = largest_finite<kType, 7>(memory, columns);
    const int first = std::min(columns, kOfPiece);
    in_pieces = largest_finite_of_pieces<kType>(memory, first, std::min(columns - first, kOfPiece),
                                                [&] { return memory + kStreamPiece; });
  });
  grid.run();
  const float expected = oracle::nvfp4_row_scale(numbers);
  EXPECT_EQ(nvfp4_row_scale(whole), expected) << columns << " columns";
  if (columns <= 2 * kOfPiece) EXPECT_EQ(nvfp4_row_scale(in_pieces), expected) << columns << " columns";
}

TEST(Nvfp4Blocks, LargestFiniteMagnitudes) {
  std::mt19937_64 random(test::seed());
  for (const int columns : {32, 256, 1792, 1824, 3584, 3616, 5408, 7168, 8992}) {
    for (const Special special :
         {Special::none, Special::one_infinity, Special::anything, Special::only_nan}) {
      SCOPED_TRACE(static_cast<int>(special));
      expect_largest_finite<DType::bf16>(columns, special, random);
      expect_largest_finite<DType::fp16>(columns, special, random);
    }
  }
}

}  // namespace
}  // namespace ferry::cuda
