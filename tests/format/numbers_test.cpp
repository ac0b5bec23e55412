// Compares the conversions between fp32 and 8- and 16-bit types with tables of values in double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "format/numbers.hpp"
#include "format/oracle.hpp"
#include "format/support.hpp"

namespace ferry::test {
namespace {

struct NumberType {
  const char* name;
  const NumberTable& table;
  std::uint32_t (*from_fp32)(float);
  float (*to_fp32)(std::uint32_t);
};

const NumberType kNumberTypes[] = {
    {"bf16", NumberTable::bf16(), [](float x) -> std::uint32_t { return fp32_to_bf16(x); },
     [](std::uint32_t x) { return bf16_to_fp32(static_cast<std::uint16_t>(x)); }},
    {"fp16", NumberTable::fp16(), [](float x) -> std::uint32_t { return fp32_to_fp16(x); },
     [](std::uint32_t x) { return fp16_to_fp32(static_cast<std::uint16_t>(x)); }},
    {"e4m3", NumberTable::e4m3(), [](float x) -> std::uint32_t { return fp32_to_e4m3(x); },
     [](std::uint32_t x) { return e4m3_to_fp32(static_cast<std::uint8_t>(x)); }},
};

std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float fp32(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

class Numbers : public testing::TestWithParam<NumberType> {};

INSTANTIATE_TEST_SUITE_P(Types, Numbers, testing::ValuesIn(kNumberTypes),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(Numbers, EveryCodeBecomesItsValue) {
  const auto& [name, table, from_fp32, to_fp32] = GetParam();
  for (std::uint32_t code = 0; code < 2 * table.sign(); ++code) {
    const double expected = table.decode(code);
    if (std::isnan(expected)) {
      ASSERT_EQ(bits_of_float(to_fp32(code)), 0x7FFFFFFFu) << std::hex << code;
    } else {
      ASSERT_EQ(bits_of_float(to_fp32(code)), bits_of_float(static_cast<float>(expected)))
          << std::hex << code;
      ASSERT_EQ(from_fp32(to_fp32(code)), std::isinf(expected) ? (code & table.sign()) | table.over() : code);
    }
  }
}

TEST_P(Numbers, EveryTieAndItsNeighboursRound) {
  const auto& [name, table, from_fp32, to_fp32] = GetParam();
  for (std::uint32_t code = 0; code <= table.largest(); ++code) {
    const auto tie = static_cast<float>(table.midpoint(code));
    ASSERT_EQ(static_cast<double>(tie), table.midpoint(code));
    for (const float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, INFINITY)}) {
      ASSERT_EQ(from_fp32(value), table.encode(value)) << std::hex << bits_of_float(value);
      ASSERT_EQ(from_fp32(-value), table.encode(-value)) << std::hex << bits_of_float(-value);
    }
  }
}

TEST_P(Numbers, SpecialValues) {
  const auto& [name, table, from_fp32, to_fp32] = GetParam();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(from_fp32(0.0f), 0u);
  EXPECT_EQ(from_fp32(-0.0f), table.sign());
  EXPECT_EQ(from_fp32(kInfinity), table.over());
  EXPECT_EQ(from_fp32(-kInfinity), table.sign() | table.over());
  EXPECT_EQ(from_fp32(std::numeric_limits<float>::denorm_min()), 0u);
  EXPECT_EQ(from_fp32(-std::numeric_limits<float>::denorm_min()), table.sign());
  EXPECT_EQ(from_fp32(std::numeric_limits<float>::max()), table.over());
  for (const std::uint32_t bits :
       {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFC00000u, 0xFFFFFFFFu}) {
    EXPECT_EQ(from_fp32(fp32(bits)), table.nan()) << std::hex << bits;
  }
}

TEST_P(Numbers, RandomBitsRound) {
  const auto& [name, table, from_fp32, to_fp32] = GetParam();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(seed()));
  Random random(seed());
  for (int i = 0; i < (1 << 22); ++i) {
    const float value = fp32(static_cast<std::uint32_t>(random()));
    ASSERT_EQ(from_fp32(value), table.encode(value)) << std::hex << bits_of_float(value);
  }
}

}  // namespace
}  // namespace ferry::test
