// From measured times to the figures of a benchmark.
#include "tools/ferry/bench/point.hpp"

#include <gtest/gtest.h>

namespace ferry::app {
namespace {

TEST(BenchTimes, PercentilesAreMeasuredValues) {
  EXPECT_EQ(percentile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(percentile({4, 1, 3, 2}, 0.5), 3);  // index 1.5, rounded up
  EXPECT_EQ(percentile({7}, 0.99), 7);
  std::vector<double> hundred(101);
  for (std::size_t i = 0; i < hundred.size(); ++i) hundred[i] = static_cast<double>(100 - i);
  EXPECT_EQ(percentile(hundred, 0.99), 99);
  EXPECT_EQ(times_of(hundred).p50, 50);
}

TEST(BenchTimes, AReplayTakesAsLongAsOnItsSlowestRank) {
  EXPECT_EQ(slowest({{1, 5, 2}, {2, 3, 2}, {0, 4, 3}}), (std::vector<double>{2, 5, 3}));
}

}  // namespace
}  // namespace ferry::app
