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

std::string replica_refusal(const std::vector<std::vector<int>>& experts_of_rank, int experts) {
  return test::refusal([&] { Placement::replicas(experts_of_rank, experts); });
}

TEST(Placement, ReplicasAreInRankOrder) {
  const Placement placement = Placement::replicas({{2, 0}, {}, {1, 2}, {2}}, 3, 4);
  EXPECT_EQ(placement.experts(), 3);
  EXPECT_EQ(placement.ranks(), 4);
  EXPECT_EQ(placement.total_replicas(), 5);
  EXPECT_TRUE(placement.has_replicas());
  EXPECT_EQ(placement.version(), 4u);
  EXPECT_EQ(placement.most_local_experts(), 2);
  EXPECT_EQ(placement.experts_of(2), (std::vector<int>{1, 2}));
  const std::span<const ExpertLocation> two = placement.replicas_of(2);
  EXPECT_EQ(std::vector(two.begin(), two.end()), (std::vector<ExpertLocation>{{0, 0}, {2, 1}, {3, 0}}));
  EXPECT_EQ(placement.replicas_of(1).size(), 1u);
  EXPECT_EQ(placement.location(2), (ExpertLocation{0, 0}));
}

TEST(Placement, OneReplicaEachIsATable) {
  const Placement placement = Placement::replicas({{1}, {2, 0}}, 3);
  EXPECT_FALSE(placement.has_replicas());
  EXPECT_EQ(placement, Placement::table({{1, 1}, {0, 0}, {1, 0}}, 2));
}

TEST(Placement, RefusesReplicasThatAreNone) {
  EXPECT_EQ(replica_refusal({{0, 2}, {2}}, 3), "placement: no rank holds expert 1");
  EXPECT_EQ(
      replica_refusal({{0}, {1, 0, 1}}, 2),
      "placement: rank 1 holds expert 1 twice, as its local experts 0 and 2: an expert may be once on a "
      "rank");
  EXPECT_EQ(replica_refusal({{0}, {2}}, 2),
            "placement: local expert 0 of rank 1 is expert 2, must be 0 to 1");
  EXPECT_EQ(replica_refusal({{-1}}, 1), "placement: local expert 0 of rank 0 is expert -1, must be 0 to 0");
  EXPECT_NE(replica_refusal({}, 2), "accepted");
  EXPECT_NE(replica_refusal({{}}, 0), "accepted");
}

// The hash and the choice as docs/contract.md has them, written again.
std::uint32_t mixed(std::uint32_t x) {
  x ^= x >> 16;
  x *= 2246822507u;
  x ^= x >> 13;
  x *= 3266489909u;
  return x ^ x >> 16;
}

TEST(Placement, ARouteTakesTheReplicaOfItsHash) {
  const Placement placement = Placement::replicas({{0, 1}, {1}, {1, 0}, {1}}, 2);
  std::vector<int> taken(4, 0);
  for (int token = 0; token < 500; ++token) {
    for (int source = 0; source < 4; ++source) {
      for (int slot = 0; slot < 8; ++slot) {
        const std::uint32_t hash = mixed(static_cast<std::uint32_t>(token) * 2654435761u +
                                         static_cast<std::uint32_t>(source) * 2246822519u +
                                         static_cast<std::uint32_t>(slot) * 3266489917u);
        const RouteOrigin route{token, source, slot};
        ASSERT_EQ(placement.location(0, route).rank, hash % 2 == 0 ? 0 : 2);
        ASSERT_EQ(placement.location(1, route).rank, static_cast<int>(hash % 4));
        ++taken[hash % 4];
      }
    }
  }
  // 16,000 routes over 4 replicas: six standard deviations are 330.
  for (const int count : taken) EXPECT_NEAR(count, 4000, 330);
  EXPECT_EQ(Placement::blocks(6, 2).location(4, {1, 2, 3}).rank, 1);
}

}  // namespace
}  // namespace ferry
