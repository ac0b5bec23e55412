#include "ferry/placement.hpp"

#include <gtest/gtest.h>

#include "refusal.hpp"

namespace ferry {
namespace {

std::string refusal(const std::vector<ExpertLocation>& locations, int ranks) {
  return test::refusal([&] { Placement::table(locations, ranks); });
}

TEST(Placement, BlocksGiveTheFirstRanksOneExpertMore) {
  const Placement placement = Placement::blocks(10, 4);
  EXPECT_EQ(placement.local_experts(0), 3);
  EXPECT_EQ(placement.local_experts(1), 3);
  EXPECT_EQ(placement.local_experts(2), 2);
  EXPECT_EQ(placement.local_experts(3), 2);
  EXPECT_EQ(placement.most_local_experts(), 3);
  EXPECT_EQ(placement.location(6), (ExpertLocation{2, 0}));
  EXPECT_EQ(placement.experts_of(1), (std::vector<int>{3, 4, 5}));
}

TEST(Placement, BlocksLeaveRanksEmptyWithFewExperts) {
  const Placement placement = Placement::blocks(2, 5);
  EXPECT_EQ(placement.local_experts(1), 1);
  EXPECT_EQ(placement.local_experts(4), 0);
}

TEST(Placement, TableKeepsTheGivenLocalOrder) {
  const Placement placement = Placement::table({{1, 1}, {0, 0}, {1, 0}}, 3, 7);
  EXPECT_EQ(placement.experts_of(1), (std::vector<int>{2, 0}));
  EXPECT_EQ(placement.local_experts(2), 0);
  EXPECT_EQ(placement.version(), 7u);
}

TEST(Placement, RefusesTwoExpertsAtOneLocation) {
  EXPECT_EQ(refusal({{0, 0}, {1, 0}, {1, 0}, {1, 1}}, 2),
            "placement: experts 1 and 2 are both local expert 0 of rank 1");
}

TEST(Placement, RefusesGapsInTheLocalNumbers) {
  EXPECT_EQ(refusal({{0, 0}, {0, 2}}, 1),
            "placement: expert 1 is local expert 2 of rank 0, which holds 2: its local experts must be 0 to "
            "1 without gaps");
}

TEST(Placement, RefusesRanksOutOfRange) {
  EXPECT_EQ(refusal({{0, 0}, {2, 0}}, 2), "placement: expert 1 is on rank 2, must be 0 to 1");
  EXPECT_EQ(refusal({{-1, 0}}, 2), "placement: expert 0 is on rank -1, must be 0 to 1");
}

TEST(Placement, RefusesNoExpertsAndNoRanks) {
  EXPECT_NE(refusal({}, 2), "accepted");
  EXPECT_THROW(Placement::blocks(0, 2), UsageError);
  EXPECT_THROW(Placement::blocks(2, 0), UsageError);
}

}  // namespace
}  // namespace ferry
