#include "trace/random.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "trace/files.hpp"

namespace {

using ferry::trace::portable_exp;
using ferry::trace::portable_ln;

TEST(PortableMath, AgreesWithTheStandardLibrary) {
  const std::uint64_t s = trace_test::seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(s));
  std::mt19937_64 random(s);
  std::uniform_real_distribution<double> exponent(-300, 300), near(0.5, 2);
  for (int i = 0; i < 100000; ++i) {
    const double x = exponent(random);
    ASSERT_NEAR(portable_exp(x) / std::exp(x), 1.0, 2e-13) << x;
    const double large = std::pow(10.0, x);
    ASSERT_NEAR(portable_ln(large) / std::log(large), 1.0, 1e-14) << large;
    const double one = near(random);
    ASSERT_NEAR(portable_ln(one), std::log(one), 5e-16) << one;
  }
}

TEST(PortableMath, IsAccurateAtTheEndsOfItsRange) {
  EXPECT_EQ(portable_ln(1.0), 0.0);
  EXPECT_EQ(portable_exp(0.0), 1.0);
  EXPECT_NEAR(portable_ln(std::numeric_limits<double>::min()), std::log(std::numeric_limits<double>::min()),
              1e-12);
  EXPECT_NEAR(portable_ln(0x1p-54), -54 * std::log(2.0), 1e-13);
}

}  // namespace
