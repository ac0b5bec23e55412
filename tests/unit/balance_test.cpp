#include "ferry/balance.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <numeric>
#include <random>

#include "refusal.hpp"
#include "seed.hpp"

namespace ferry {
namespace {

using Loads = std::vector<double>;

// Skewed as a router's: lognormal, with one expert in fifty hot.
Loads skewed_loads(std::mt19937_64& random, int experts) {
  std::lognormal_distribution<double> popularity(0, 0.9);
  Loads loads;
  for (int e = 0; e < experts; ++e) loads.push_back(popularity(random) * (random() % 50 == 0 ? 6 : 1));
  return loads;
}

// The busiest of `ranks` over the mean; a replica has an equal share of its expert's load.
double unevenness(const Loads& loads, const std::vector<std::vector<int>>& experts_of_rank) {
  std::vector<int> replicas(loads.size(), 0);
  for (const auto& held : experts_of_rank)
    for (const int expert : held) ++replicas[static_cast<std::size_t>(expert)];
  double busiest = 0;
  for (const auto& held : experts_of_rank) {
    double load = 0;
    for (const int expert : held)
      load += loads[static_cast<std::size_t>(expert)] / replicas[static_cast<std::size_t>(expert)];
    busiest = std::max(busiest, load);
  }
  return busiest * static_cast<double>(experts_of_rank.size()) /
         std::accumulate(loads.begin(), loads.end(), 0.0);
}

std::vector<std::vector<int>> ranks_of(const Placement& placement) {
  std::vector<std::vector<int>> ranks;
  for (int rank = 0; rank < placement.ranks(); ++rank) ranks.push_back(placement.experts_of(rank));
  return ranks;
}

// One greedy pass: every slot is used, the largest share is split next, and then the largest goes to the
// least loaded rank with room. Replicas may meet on a rank.
double greedy_unevenness(const Loads& loads, int ranks, int slots) {
  std::vector<int> replicas(loads.size(), 1);
  const auto share = [&](std::size_t e) { return loads[e] / replicas[e]; };
  for (std::size_t i = loads.size(); i < static_cast<std::size_t>(ranks) * static_cast<std::size_t>(slots);
       ++i) {
    std::size_t largest = 0;
    for (std::size_t e = 1; e < loads.size(); ++e)
      if (share(e) > share(largest)) largest = e;
    ++replicas[largest];
  }
  std::vector<double> shares;
  for (std::size_t e = 0; e < loads.size(); ++e)
    shares.insert(shares.end(), static_cast<std::size_t>(replicas[e]), share(e));
  std::sort(shares.rbegin(), shares.rend());
  std::vector<double> load(static_cast<std::size_t>(ranks), 0);
  std::vector<int> held(static_cast<std::size_t>(ranks), 0);
  for (const double each : shares) {
    std::size_t least = load.size();
    for (std::size_t rank = 0; rank < load.size(); ++rank)
      if (held[rank] < slots && (least == load.size() || load[rank] < load[least])) least = rank;
    load[least] += each;
    ++held[least];
  }
  return *std::max_element(load.begin(), load.end()) * ranks /
         std::accumulate(loads.begin(), loads.end(), 0.0);
}

struct Size {
  int experts, ranks, slots;
};

TEST(Balance, IsAtLeastAsEvenAsAGreedyPass) {
  const std::uint64_t seed = test::seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const Size size :
       {Size{64, 8, 9}, {64, 16, 5}, {256, 8, 36}, {256, 32, 9}, {256, 64, 5}, {60, 7, 9}}) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      Loads loads = skewed_loads(random, size.experts);
      const Placement placement =
          balance(loads, 1, size.experts, {.ranks = size.ranks, .slots = size.slots})[0];
      EXPECT_EQ(placement.ranks(), size.ranks);
      EXPECT_LE(placement.most_local_experts(), size.slots);
      EXPECT_LE(unevenness(loads, ranks_of(placement)),
                greedy_unevenness(loads, size.ranks, size.slots) * (1 + 1e-9))
          << size.experts << " experts on " << size.ranks << " ranks of " << size.slots << " slots";
    }
  }
}

TEST(Balance, GivesEveryExpertAPlaceWhateverTheSlots) {
  const std::uint64_t seed = test::seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const int ranks = 1 + static_cast<int>(random() % 9), experts = 1 + static_cast<int>(random() % 40);
    const int slots = (experts + ranks - 1) / ranks + static_cast<int>(random() % 3);
    Loads loads = skewed_loads(random, experts);
    for (double& load : loads) load *= random() % 4 != 0;
    const Placement placement = balance(loads, 1, experts, {.ranks = ranks, .slots = slots})[0];
    EXPECT_EQ(placement.experts(), experts);
    EXPECT_LE(placement.most_local_experts(), slots);
    const Placement blocks = Placement::blocks(experts, ranks);
    const Placement moved =
        balance(loads, 1, experts, {.ranks = ranks, .slots = slots, .earlier = {&blocks, 1}})[0];
    EXPECT_LE(moved.most_local_experts(), slots);
  }
}

TEST(Balance, LeavesLessToChanceWhereLoadsAreRoutes) {
  // The only expert with replicas is on ranks 0 and 1, whose numbers of routes vary by sqrt(2000 / 4).
  Loads loads(62, 32.0);
  loads.push_back(2000);
  const Placement placement = balance(loads, 1, 63, {.ranks = 4, .slots = 62})[0];
  const double mean = std::accumulate(loads.begin(), loads.end(), 0.0) / 4;
  for (const ExpertLocation& replica : placement.replicas_of(62)) {
    const auto others = static_cast<double>(placement.local_experts(replica.rank) - 1);
    const double share = 2000.0 / static_cast<double>(placement.replicas_of(62).size());
    EXPECT_LT(others * 32 + share, mean);
  }
}

TEST(Balance, KeepsReplicasAndGroupsOnOneNode) {
  const std::uint64_t seed = test::seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const int groups : {0, 8, 32}) {
    const Loads loads = skewed_loads(random, 64);
    const Placement placement =
        balance(loads, 1, 64, {.ranks = 8, .slots = 10, .nodes = 2, .groups = groups})[0];
    const int size = groups == 0 ? 1 : 64 / groups;
    for (int expert = 0; expert < 64; ++expert) {
      for (const ExpertLocation& replica : placement.replicas_of(expert))
        EXPECT_EQ(replica.rank / 4, placement.location(expert / size * size).rank / 4) << "expert " << expert;
    }
  }
}

TEST(Balance, MovesFewExpertsFromAnEarlierPlacement) {
  const std::uint64_t seed = test::seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::normal_distribution<double> change(0, 0.1);
  for (const int nodes : {1, 4}) {
    Loads loads = skewed_loads(random, 256);
    const BalanceOptions options{.ranks = 32, .slots = 9, .nodes = nodes};
    const std::vector<Placement> earlier = balance(loads, 1, 256, options);
    for (double& load : loads) load *= std::exp(change(random));
    const Placement fresh = balance(loads, 1, 256, options)[0];
    BalanceOptions from_earlier = options;
    from_earlier.earlier = earlier;
    const Placement placement = balance(loads, 1, 256, from_earlier)[0];
    EXPECT_LE(unevenness(loads, ranks_of(placement)), unevenness(loads, ranks_of(fresh)) * 1.02);
    EXPECT_LT(moved_experts(earlier[0], placement), 128);
    EXPECT_LT(moved_experts(earlier[0], placement), moved_experts(earlier[0], fresh) / 2);
    EXPECT_EQ(balance(loads, 1, 256, from_earlier)[0], placement);
    for (int rank = 0; rank < 32; ++rank) {
      const std::vector<int>&before = earlier[0].experts_of(rank), &after = placement.experts_of(rank);
      if (after.size() < before.size()) continue;
      for (std::size_t local = 0; local < before.size(); ++local) {
        if (std::find(after.begin(), after.end(), before[local]) == after.end()) continue;
        EXPECT_EQ(after[local], before[local]) << "local expert " << local << " of rank " << rank;
      }
    }
    // With unchanged loads no expert moves.
    from_earlier.earlier = {&placement, 1};
    EXPECT_EQ(moved_experts(placement, balance(loads, 1, 256, from_earlier)[0]), 0);
  }
}

TEST(Balance, TreatsLayersApartAndLoadsOfZeroAlike) {
  Loads loads(32, 0.0);
  for (int e = 16; e < 32; ++e) loads[static_cast<std::size_t>(e)] = e;
  const std::vector<Placement> placements = balance(loads, 2, 16, {.ranks = 4, .slots = 5});
  ASSERT_EQ(placements.size(), 2u);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(placements[0].local_experts(rank), 4);
  EXPECT_LT(unevenness({loads.begin() + 16, loads.end()}, ranks_of(placements[1])), 1.02);
  EXPECT_TRUE(balance({}, 0, 16, {.ranks = 4, .slots = 5}).empty());
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which slow it down

TEST(Balance, TakesLessThanASecondForALargeModel) {
  std::mt19937_64 random(test::seed());
  Loads loads;
  for (int layer = 0; layer < 58; ++layer) {
    for (const double load : skewed_loads(random, 256)) loads.push_back(std::floor(load * 1000));
  }
  const std::clock_t begin = std::clock();
  balance(loads, 58, 256, {.ranks = 64, .slots = 5});
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 1.0);
}

#endif

std::string refusal(const Loads& loads, int layers, int experts, const BalanceOptions& options) {
  return test::refusal([&] { balance(loads, layers, experts, options); });
}

TEST(Balance, RefusesLoads) {
  Loads loads(8, 1.0);
  const BalanceOptions options{.ranks = 2, .slots = 2};
  EXPECT_EQ(refusal(loads, 3, 4, options), "balance: loads has 8 values, must be [layers, experts] = [3, 4]");
  loads[5] = -0.5;
  EXPECT_EQ(refusal(loads, 2, 4, options), "balance: loads[1, 1] = -0.5, must be finite and 0 or more");
  loads[5] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(refusal(loads, 2, 4, options), "balance: loads[1, 1] = nan, must be finite and 0 or more");
  loads[5] = std::numeric_limits<double>::infinity();
  EXPECT_EQ(refusal(loads, 2, 4, options), "balance: loads[1, 1] = inf, must be finite and 0 or more");
}

TEST(Balance, RefusesSizes) {
  const Loads loads(8, 1.0);
  EXPECT_EQ(refusal(loads, 1, 8, {.ranks = 3, .slots = 2}),
            "balance: 8 experts do not fit the 6 slots of 3 ranks: pass slots = 3 or more");
  EXPECT_EQ(refusal(loads, 1, 8, {.ranks = 0, .slots = 2}), "balance: ranks = 0, must be 1 or more");
  EXPECT_EQ(refusal(loads, 1, 8, {.ranks = 4, .slots = 0}), "balance: slots = 0, must be 1 or more");
  EXPECT_EQ(refusal(loads, 1, 8, {.ranks = 4, .slots = 3, .nodes = 3}),
            "balance: nodes = 3, must be 1 or more, and divide ranks = 4");
  EXPECT_EQ(refusal(loads, 1, 8, {.ranks = 4, .slots = 3, .groups = 3}),
            "balance: groups = 3, must be 0, or 1 or more and divide experts = 8");
  EXPECT_EQ(
      refusal(loads, 1, 8, {.ranks = 4, .slots = 2, .nodes = 4, .groups = 2}),
      "balance: 2 groups of 4 experts do not fit 4 nodes of 2 slots, which hold 0 groups each: pass more "
      "slots, or groups = 0");
}

TEST(Balance, RefusesEarlierPlacements) {
  const Loads loads(8, 1.0);
  const auto with = [&](const std::vector<Placement>& earlier, int slots) {
    return refusal(loads, 1, 8, {.ranks = 4, .slots = slots, .earlier = earlier});
  };
  const Placement blocks = Placement::blocks(8, 4);
  EXPECT_EQ(with({blocks}, 2), "accepted");
  EXPECT_EQ(with({blocks, blocks}, 2),
            "balance: earlier has 2 placements, must have one for each of 1 layer, or none");
  EXPECT_EQ(with({Placement::blocks(8, 2)}, 4),
            "balance: earlier[0] is of 8 experts on 2 ranks, tp 1, must be of 8 on 4, tp 1");
  EXPECT_EQ(with({Placement::replicas({{0, 1, 2}, {3, 4}, {5, 6}, {7}}, 8)}, 2),
            "balance: earlier[0] has 3 experts on rank 0, must have at most slots = 2");
  EXPECT_EQ(test::refusal([&] { moved_experts(blocks, Placement::blocks(8, 2)); }),
            "moved_experts: placements of 8 experts on 4 ranks and of 8 on 2: they must be of the same");
}

}  // namespace
}  // namespace ferry
