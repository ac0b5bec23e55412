// Converts every fp32 in ascending order to each 8- and 16-bit type: the nearest value never decreases.
#include <gtest/gtest.h>

#include <cstring>

#include "format/numbers.hpp"
#include "format/oracle.hpp"

namespace ferry::test {
namespace {

constexpr std::uint32_t kInfinity = 0x7F800000u;

float fp32(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The bits of the smallest fp32 that rounds to code + 1.
std::uint32_t first_above(const NumberTable& table, std::uint32_t code) {
  const auto tie = static_cast<float>(table.midpoint(code));
  std::uint32_t bits;
  std::memcpy(&bits, &tie, sizeof bits);
  return code % 2 == 0 ? bits + 1 : bits;
}

template <class Convert>
void expect_all(const NumberTable& table, Convert convert) {
  std::uint32_t bits = 0;
  for (std::uint32_t code = 0; code <= table.over(); ++code) {
    const std::uint32_t end = code == table.over() ? kInfinity + 1 : first_above(table, code);
    std::uint32_t wrong = 0;
    for (; bits < end; ++bits) {
      wrong += convert(fp32(bits)) != code;
      wrong += convert(fp32(bits | 0x80000000u)) != (code | table.sign());
    }
    ASSERT_EQ(wrong, 0u) << std::hex << "code " << code;
  }
  std::uint32_t wrong = 0;
  for (; bits <= 0x7FFFFFFFu; ++bits) {
    wrong += convert(fp32(bits)) != table.nan();
    wrong += convert(fp32(bits | 0x80000000u)) != table.nan();
  }
  ASSERT_EQ(wrong, 0u) << "NaN";
}

TEST(AllNumbers, Bf16) {
  expect_all(NumberTable::bf16(), [](float x) { return std::uint32_t{fp32_to_bf16(x)}; });
}

TEST(AllNumbers, Fp16) {
  expect_all(NumberTable::fp16(), [](float x) { return std::uint32_t{fp32_to_fp16(x)}; });
}

TEST(AllNumbers, E4m3) {
  expect_all(NumberTable::e4m3(), [](float x) { return std::uint32_t{fp32_to_e4m3(x)}; });
}

}  // namespace
}  // namespace ferry::test
