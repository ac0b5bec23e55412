#include "ferry/placement.hpp"

#include <gtest/gtest.h>

#include <string>

#include "ferry/error.hpp"

namespace ferry {
namespace {

// The message of the error that making the table throws.
std::string refusal(std::vector<ExpertLocation> places, int ranks) {
  try {
    Placement::table(std::move(places), ranks);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Placement, BlocksGiveTheFirstRanksOneMore) {
  const Placement placement = Placement::blocks(10, 4);
  EXPECT_EQ(placement.local_experts(0), 3);
  EXPECT_EQ(placement.local_experts(1), 3);
  EXPECT_EQ(placement.local_experts(2), 2);
  EXPECT_EQ(placement.local_experts(3), 2);
  EXPECT_EQ(placement.most_local_experts(), 3);
  EXPECT_EQ(placement.place(6), (ExpertLocation{2, 0}));
  EXPECT_EQ(placement.experts_of(1), (std::vector<int>{3, 4, 5}));
}

TEST(Placement, BlocksWithMoreRanksThanExperts) {
  const Placement placement = Placement::blocks(2, 5);
  EXPECT_EQ(placement.local_experts(1), 1);
  EXPECT_EQ(placement.local_experts(4), 0);
}

TEST(Placement, TableKeepsTheLocalOrderGiven) {
  const Placement placement = Placement::table({{1, 1}, {0, 0}, {1, 0}}, 3, 7);
  EXPECT_EQ(placement.experts_of(1), (std::vector<int>{2, 0}));
  EXPECT_EQ(placement.local_experts(2), 0);
  EXPECT_EQ(placement.version(), 7u);
}

TEST(Placement, RefusesTwoExpertsAtOnePlace) {
  EXPECT_EQ(refusal({{0, 0}, {1, 0}, {1, 0}, {1, 1}}, 2),
            "placement: experts 1 and 2 are both local expert 0 of rank 1");
}

TEST(Placement, RefusesAHole) {
  EXPECT_EQ(refusal({{0, 0}, {0, 2}}, 1),
            "placement: expert 1 is local expert 2 of rank 0, which holds 2: its local experts must be 0 to "
            "1 without a hole");
}

TEST(Placement, RefusesARankThatIsNotThere) {
  EXPECT_EQ(refusal({{0, 0}, {2, 0}}, 2), "placement: expert 1 is on rank 2, there are 2 ranks");
  EXPECT_EQ(refusal({{-1, 0}}, 2), "placement: expert 0 is on rank -1, there are 2 ranks");
}

TEST(Placement, RefusesNothingAtAll) {
  EXPECT_NE(refusal({}, 2), "");
  EXPECT_THROW(Placement::blocks(0, 2), UsageError);
  EXPECT_THROW(Placement::blocks(2, 0), UsageError);
}

}  // namespace
}  // namespace ferry
