#include <gtest/gtest.h>

#include "own_shared_folder.hpp"
#include "stress/stress.hpp"

namespace ferry {
namespace {

TEST(StressLong, OneMillionDelayedCallsReadNothingStale) {
  run_with_random_delays(3, 1000000);
}

TEST(StressLong, HundredThousandCallsLeaveNoGrowth) {
  const test::OwnSharedFolder folder;
  EXPECT_NO_THROW(Group::threads(4).run([](Rank rank) { require_no_growth(rank, 100000); }));
  EXPECT_NO_THROW(Group::processes(4).run([](Rank rank) { require_no_growth(rank, 100000); }));
  EXPECT_TRUE(folder.empty());
}

}  // namespace
}  // namespace ferry
