// Configurations compared between ranks, and what is chosen by the nodes of the ranks.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "unit/valid_config.hpp"

namespace ferry {
namespace {

// The message that ranks throw when rank 1 has this configuration and the others valid_config(), on this
// number of nodes; empty: no rank throws.
std::string difference(const Config& config_of_rank_1, int nodes = 1) {
  std::array<std::string, kRanks> messages;
  Group::threads(kRanks, nodes).run([&](Rank rank) {
    try {
      agree_on_config(rank, rank.index() == 1 ? config_of_rank_1 : valid_config());
    } catch (const UsageError& error) {
      messages[static_cast<std::size_t>(rank.index())] = error.what();
    }
  });
  for (const std::string& each : messages) EXPECT_EQ(each.empty(), messages.back().empty());
  return messages.back();
}

TEST(Configuration, DifferencesAreNamedOnEveryRank) {
  Config config = valid_config();
  config.max_tokens = 17;
  EXPECT_EQ(
      difference(config),
      "configurations differ: max_tokens is 16 on rank 0 and 17 on rank 1: pass the same on every rank");
  config = valid_config();
  config.hops = Hops::one;
  EXPECT_EQ(difference(config), "") << "one hop is what automatic means on one node";
  config = valid_config();
  config.window = 7;
  EXPECT_EQ(difference(config),
            "configurations differ: window is 0 on rank 0 and 7 on rank 1: pass the same on every rank");
  config = valid_config();
  config.format = Format::fp8_e4m3();
  EXPECT_EQ(difference(config),
            "configurations differ: format is bf16 on rank 0 and fp8 on rank 1: pass the same on every rank");
  config = valid_config();
  config.placement =
      Placement::table({{0, 0}, {0, 2}, {0, 1}, {1, 0}, {1, 1}, {1, 2}, {2, 0}, {2, 1}, {3, 0}, {3, 1}}, 4);
  EXPECT_EQ(difference(config),
            "configurations differ: placement: location of expert 1 (rank.local) is 0.1 on rank 0 and 0.2 on "
            "rank 1: pass the same on every rank");
}

TEST(Configuration, TwoHopsAreChosenWhereANodeHasSeveralRanks) {
  const Topology one_node({0, 0, 0}), single_ranks({0, 1, 2}), uneven({0, 1, 0});
  Config config = valid_config();
  EXPECT_EQ(chosen_hops(config, uneven), Hops::one) << "cpu: nodes share memory";
  config.hops = Hops::two;
  EXPECT_EQ(chosen_hops(config, uneven), Hops::two);
  config.hops = Hops::automatic;
  config.backend = BackendKind::collective;
  EXPECT_EQ(chosen_hops(config, one_node), Hops::one);
  EXPECT_EQ(chosen_hops(config, single_ranks), Hops::one);
  EXPECT_EQ(chosen_hops(config, uneven), Hops::two);
  config.hops = Hops::one;
  EXPECT_EQ(chosen_hops(config, uneven), Hops::one);
  config.hops = Hops::two;
  EXPECT_EQ(chosen_hops(config, one_node), Hops::two);
}

// Few tokens: the time is that of the way, which a relay makes longer.
TEST(Configuration, NvshmemTakesOneHopForFewTokens) {
  const Topology one_node({0, 0, 0}), single_ranks({0, 1, 2}), uneven({0, 1, 0});
  Config config = valid_config();
  config.backend = BackendKind::nvshmem;
  EXPECT_EQ(chosen_memory(config), MemoryKind::device);
  config.hidden = 7168;
  const int most = static_cast<int>(kOneHopValues / config.hidden);
  EXPECT_GE(most, 1);
  for (const Topology& topology : {single_ranks, uneven}) {
    config.max_tokens = most;
    EXPECT_EQ(chosen_hops(config, topology), Hops::one);
    config.max_tokens = most + 1;
    EXPECT_EQ(chosen_hops(config, topology), Hops::two);
    EXPECT_TRUE(has_relays(config, topology));
    config.max_tokens = 1 << 24;
    EXPECT_EQ(chosen_hops(config, topology), Hops::two);
  }
  EXPECT_EQ(chosen_hops(config, one_node), Hops::one);
  for (const Hops asked : {Hops::one, Hops::two}) {
    for (const int tokens : {1, 4096}) {
      config.hops = asked;
      config.max_tokens = tokens;
      EXPECT_EQ(chosen_hops(config, uneven), asked);
    }
  }
  // Only nvshmem: engines pass messages of any number by relays.
  config.hops = Hops::automatic;
  config.max_tokens = 1;
  config.backend = BackendKind::collective;
  EXPECT_EQ(chosen_hops(config, uneven), Hops::two);
}

// The hops follow from fields that the ranks compare, so a difference names the field.
TEST(Configuration, ADifferenceThatChangesTheHopsNamesTheTokens) {
  std::array<std::string, 2> messages;
  Group::threads(2, 2).run([&](Rank rank) {
    Config config = valid_config();
    config.backend = BackendKind::nvshmem;
    config.hidden = 7168;
    config.max_tokens = rank.index() == 0 ? 1 : 4096;
    try {
      agree_on_config(rank, config);
    } catch (const UsageError& error) {
      messages[static_cast<std::size_t>(rank.index())] = error.what();
    }
  });
  for (const std::string& message : messages)
    EXPECT_EQ(
        message,
        "configurations differ: max_tokens is 1 on rank 0 and 4096 on rank 1: pass the same on every rank");
}

TEST(Configuration, ADifferenceThatChangesTheHopsNamesTheTransfer) {
  std::string message;
  Group::threads(kRanks, 2).run([&](Rank rank) {
    Config config = valid_config();
    config.backend = BackendKind::collective;
    config.transfer = rank.index() == 1 ? Transfer::gather : Transfer::routed;
    try {
      agree_on_config(rank, config);
    } catch (const UsageError& error) {
      if (rank.index() == 0) message = error.what();
    }
  });
  EXPECT_EQ(message,
            "configurations differ: transfer is routed on rank 0 and gather on rank 1: pass the same on "
            "every rank");
}

TEST(Configuration, TheAutomaticBackendFollowsMemoryEngineAndHosts) {
  const Topology topology({0, 0, 1, 1});
  for (const MemoryKind memory : {MemoryKind::automatic, MemoryKind::host, MemoryKind::device}) {
    for (const EngineKind engine : {EngineKind::automatic, EngineKind::mpi, EngineKind::custom}) {
      for (const bool one_host : {true, false}) {
        Config config = valid_config();
        config.memory = memory;
        config.engine = engine;
        const bool device = memory == MemoryKind::device, named = engine != EngineKind::automatic;
        EXPECT_EQ(resolve_by_hosts(config, topology, one_host), named || one_host || !device);
        const BackendKind on_one_host = device ? BackendKind::cuda : BackendKind::cpu;
        const BackendKind on_several = device ? BackendKind::automatic : BackendKind::collective;
        EXPECT_EQ(config.backend, named ? BackendKind::collective : one_host ? on_one_host : on_several);
      }
    }
  }
  Config config = valid_config();
  config.engine = EngineKind::nccl;
  EXPECT_EQ(chosen_memory(config), MemoryKind::device);
  EXPECT_TRUE(resolve_by_hosts(config, topology, false));
  EXPECT_EQ(config.backend, BackendKind::collective);
}

TEST(Configuration, DeviceMemoryOnSeveralHostsTakesWhatEveryRankCanLoad) {
  const DeviceBackendFaults none, no_nvshmem{.nvshmem = "no module", .nccl = {}},
      no_nccl{.nvshmem = {}, .nccl = "no NCCL"};
  const auto chosen = [](const std::vector<DeviceBackendFaults>& by_rank) {
    Config config = valid_config();
    choose_device_backend(config, by_rank);
    return std::pair(config.backend, config.engine);
  };
  const std::pair nvshmem(BackendKind::nvshmem, EngineKind::automatic),
      over_nccl(BackendKind::collective, EngineKind::nccl);
  EXPECT_EQ(chosen({none, none, none}), nvshmem);
  EXPECT_EQ(chosen({none, no_nccl, no_nccl}), nvshmem);
  EXPECT_EQ(chosen({none, none, no_nvshmem}), over_nccl);
  EXPECT_EQ(chosen({no_nvshmem, no_nvshmem}), over_nccl);
  try {
    chosen({none, no_nvshmem, no_nccl});
    ADD_FAILURE() << "was not refused";
  } catch (const UnsupportedError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("nvshmem: rank 1: no module\ncollective over NCCL: rank 2: no NCCL"),
              std::string::npos)
        << text;
  }
}

TEST(Configuration, NvshmemIsNotChosenForWhatItLacks) {
  Config config = valid_config();
  config.transfer = Transfer::gather;
  EXPECT_EQ(device_backend_faults(config).nvshmem, "it has no transfer gather");
  config = valid_config();
  config.placement = Placement::ep_tp(10, 2, 2);
  EXPECT_EQ(device_backend_faults(config).nvshmem, "it has no experts in slices on several hosts");
}

TEST(Configuration, SizesOfTheAutomaticBackendAreThoseOfItsChoice) {
  Config config = valid_config(), chosen = valid_config();
  chosen.backend = BackendKind::cpu;
  EXPECT_EQ(size_of(config, kRanks).total(), size_of(chosen, kRanks).total());
  const std::vector<int> nodes{0, 0, 1, 1};
  EXPECT_EQ(size_of(config, Topology(nodes, true)).total(), size_of(chosen, Topology(nodes, true)).total());
  chosen.backend = BackendKind::collective;
  EXPECT_EQ(size_of(config, Topology(nodes)).total(), size_of(chosen, Topology(nodes)).total());
  EXPECT_NE(size_of(config, Topology(nodes)).total(), size_of(config, kRanks).total());
  EXPECT_EQ(plan_bytes(config, kRanks), plan_bytes(chosen, kRanks));
}

TEST(Configuration, ARefusedConfigurationEndsConstructionOnEveryRank) {
  Config config = valid_config();
  config.top_k = 40;
  EXPECT_NE(difference(config).find("rank 1 refused its configuration: configuration: top_k = 40"),
            std::string::npos);
  config = valid_config();
  config.backend = BackendKind::reference;
  EXPECT_NE(difference(config).find("rank 1 refused its configuration: backend = reference (0)"),
            std::string::npos);
}

// The levels that an exchange of this level has on one and on two nodes.
std::vector<ReductionLevel> levels_on_nodes(ReductionLevel level) {
  std::vector<ReductionLevel> levels;
  for (const int nodes : {1, 2}) {
    Group::threads(kRanks, nodes).run([&](Rank rank) {
      Config config = valid_config();
      config.reduction_level = level;
      const Exchange exchange(rank, config);
      if (rank.index() == 0) levels.push_back(exchange.config().reduction_level);
    });
  }
  return levels;
}

TEST(Configuration, TheReductionLevelDependsOnTheNodes) {
  using enum ReductionLevel;
  EXPECT_EQ(levels_on_nodes(automatic), (std::vector{rank, node}));
  EXPECT_EQ(levels_on_nodes(rank), (std::vector{rank, rank}));
  EXPECT_EQ(levels_on_nodes(node), (std::vector{node, node}));
  Config config = valid_config();
  config.reduction_level = rank;  // as automatic, on one node
  EXPECT_EQ(difference(config, 1), "");
  config.reduction_level = node;
  EXPECT_EQ(difference(config, 1),
            "configurations differ: reduction_level is rank on rank 0 and node on rank 1: pass the same on "
            "every rank");
  EXPECT_EQ(difference(config, 2), "");
}

// Refused before the backend is looked for, so that every build can test it.
TEST(Configuration, CudaRefusesToAddByNode) {
  Config config = valid_config();
  config.backend = BackendKind::cuda;
  const auto refused = [&](int nodes) {
    std::array<std::string, kRanks> messages;
    Group::threads(kRanks, nodes).run([&](Rank rank) {
      try {
        Exchange(rank, config);
      } catch (const UnsupportedError& error) {
        messages[static_cast<std::size_t>(rank.index())] = error.what();
      }
    });
    for (const std::string& message : messages)
      EXPECT_NE(message.find("pass reduction_level rank"), std::string::npos) << message;
  };
  refused(2);
  config.reduction_level = ReductionLevel::node;
  refused(1);
}

}  // namespace
}  // namespace ferry
