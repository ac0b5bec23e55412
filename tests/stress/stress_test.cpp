#include <gtest/gtest.h>

#include "own_shared_folder.hpp"
#include "stress/stress.hpp"

namespace ferry {
namespace {

TEST(Stress, DelayedCallsReadNothingStale) {
  for (const int ranks : {2, 3, 4}) run_with_random_delays(ranks, 2000);
}

TEST(Stress, CallsLeaveNoGrowth) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers allocate memory of their own in every call";
#endif
  const test::OwnSharedFolder folder;
  EXPECT_NO_THROW(Group::threads(4).run([](Rank rank) { require_no_growth(rank, 3000); }));
  EXPECT_NO_THROW(Group::processes(4).run([](Rank rank) { require_no_growth(rank, 3000); }));
  EXPECT_TRUE(folder.empty());
}

}  // namespace
}  // namespace ferry
