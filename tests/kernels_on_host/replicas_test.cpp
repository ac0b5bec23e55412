// The choice of replicas on a device, run on the host: for every route what the placement says, and for every
// replica the scale of its expert.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "backends/cuda/replicas/choose.cuh"
#include "ferry/ferry.hpp"
#include "kernels_on_host/grid.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr std::int32_t kTokens = 301, kTopK = 3, kExperts = 5, kShared = 2, kSource = 6;

// A choice with its arrays. The ids are -1, bad, or an expert's.
template <class Id>
struct HostChoice {
  explicit HostChoice(std::mt19937_64& random) {
    for (int expert = 0; expert < kExperts; ++expert) {
      first.push_back(first.back() + static_cast<std::int32_t>(placement.replicas_of(expert).size()));
      expert_of.resize(static_cast<std::size_t>(first.back()), expert);
    }
    for (int shared = 0; shared < kShared; ++shared) expert_of.push_back(kExperts + shared);
    const Id highest = std::numeric_limits<Id>::max(), others[] = {-1, -7, kExperts, highest};
    for (Id& id : ids) {
      const auto drawn = static_cast<int>(random() % (kExperts + 4));
      id = drawn < kExperts ? static_cast<Id>(drawn) : others[drawn - kExperts];
    }
    scales = {0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f};
    chosen_scales.resize(expert_of.size());
  }

  void run(const std::int32_t* device_tokens) {
    const ReplicaChoice choice{.ids = ids.data(),
                               .wide_ids = sizeof(Id) == 8,
                               .tokens = kTokens,
                               .device_tokens = device_tokens,
                               .source = kSource,
                               .top_k = kTopK,
                               .experts = kExperts,
                               .replicas = placement.total_replicas(),
                               .first = first.data(),
                               .chosen = chosen.data(),
                               .scales = scales.data(),
                               .scale_count = static_cast<std::int32_t>(expert_of.size()),
                               .expert_of = expert_of.data(),
                               .chosen_scales = chosen_scales.data()};
    on_host::Grid grid(test::seed());
    grid.add(2, kChoiceThreads, [&](unsigned) { choose_replicas(choice); });
    grid.run();
  }

  void compare(int tokens) const {
    const int more = placement.total_replicas() - kExperts;
    for (int route = 0; route < kTokens * kTopK; ++route) {
      const auto i = static_cast<std::size_t>(route);
      const auto id = static_cast<std::int64_t>(ids[i]);
      const RouteOrigin origin{.token = route / kTopK, .source = kSource, .slot = route % kTopK};
      if (route / kTopK >= tokens) {
        ASSERT_EQ(chosen[i], kUntouched) << route;
      } else if (id >= 0 && id < kExperts) {
        ASSERT_EQ(chosen[i], placement.replica(static_cast<int>(id), origin)) << route;
      } else if (id == -1) {
        ASSERT_EQ(chosen[i], -1) << route;
      } else {
        ASSERT_TRUE(chosen[i] < -1 || chosen[i] >= placement.total_replicas()) << route;
        if (id < INT64_MAX) {
          ASSERT_EQ(id_outside(chosen[i], more), id) << route;
        }
      }
    }
    for (std::size_t i = 0; i < expert_of.size(); ++i)
      ASSERT_EQ(chosen_scales[i], scales[static_cast<std::size_t>(expert_of[i])]) << i;
  }

  static constexpr std::int64_t kUntouched = -77;
  const Placement placement =
      Placement::replicas({{0, 1}, {1, 4}, {2, 1, 4}, {3}, {4, 1}, {}, {0, 4}, {4}}, kExperts);
  std::vector<Id> ids = std::vector<Id>(kTokens * kTopK);
  std::vector<std::int64_t> chosen = std::vector<std::int64_t>(kTokens * kTopK, kUntouched);
  std::vector<std::int32_t> first = {0}, expert_of;
  std::vector<float> scales, chosen_scales;
};

template <class Id>
void run_and_compare() {
  std::mt19937_64 random(test::seed());
  for (const std::int32_t given : {0, 1, 150, kTokens, -1, kTokens + 1}) {
    HostChoice<Id> choice(random);
    choice.run(&given);
    choice.compare(given >= 0 && given <= kTokens ? given : 0);
  }
  HostChoice<Id> choice(random);
  choice.run(nullptr);
  choice.compare(kTokens);
}

TEST(ReplicaChoiceOnHost, EachRouteTakesTheReplicaOfItsHash) {
  run_and_compare<std::int64_t>();
  run_and_compare<std::int32_t>();
}

}  // namespace
}  // namespace ferry::cuda
