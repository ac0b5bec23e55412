// The processes that the contract's tests on devices run in, without devices.
#include "contract/lasting_ranks.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace ferry::contract {
namespace {

TEST(LastingRanks, PlayWhatIsTheirs) {
  LastingRanks ranks;
  std::vector<int> played;
  for (const int size : {2, 3, 2}) {
    ranks.run(size, [&](Rank rank) {
      rank.barrier();
      played.push_back(rank.size());
    });
  }
  const bool as_two = played == std::vector{2, 2}, as_three = played == std::vector{3};
  ranks.leave(!as_two && !as_three);
  EXPECT_TRUE(played.empty());
  EXPECT_EQ(ranks.wait(), "");
}

// Whoever waits for it learns that it is lost.
TEST(LastingRanks, FailAlone) {
  LastingRanks ranks;
  std::string failure;
  try {
    ranks.run(3, [](Rank rank) {
      if (rank.index() == 1) throw std::runtime_error("on purpose");
      rank.barrier();
    });
  } catch (const std::exception& error) {
    failure = error.what();
  }
  ranks.leave(!failure.empty());
  const std::string failed = ranks.wait();
  for (const char* rank : {"rank 0 of 3", "rank 1 of 3", "rank 2 of 3"})
    EXPECT_NE(failed.find(rank), std::string::npos) << failed;
}

}  // namespace
}  // namespace ferry::contract
