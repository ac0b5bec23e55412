// What the backend `automatic` becomes in groups of one and of several hosts.
#include "collective/engine_ranks.hpp"
#include "exchange/configuration.hpp"

namespace ferry::test {
namespace {

const Config kConfig{.experts = 6, .top_k = 2, .hidden = 16, .max_tokens = 4};

TEST(AutomaticBackend, RanksThatShareMemoryTakeCpu) {
  for (const int nodes : {1, 2}) {
    Group::threads(4, nodes).run([](const Rank& rank) {
      const Exchange exchange(rank, kConfig);
      EXPECT_EQ(exchange.config().backend, BackendKind::cpu);
      EXPECT_EQ(exchange.config().memory, MemoryKind::host);
    });
  }
}

// One rank names the backend that the others leave to Ferry: the configurations agree.
TEST(AutomaticBackend, RanksOfSeveralHostsTakeCollective) {
  const ThreadEngine engine(4);
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0, 0}, {0, 0, 1, 1}}) {
    const bool several = hosts.back() != 0;
    const BackendKind expected = several ? BackendKind::collective : BackendKind::cpu;
    expect_none(run_ranks(
        4, [&](int rank) { return engine.functions(rank); },
        [&](const Rank& rank) {
          Config config = kConfig;
          if (rank.index() == 2) config.backend = expected;
          const Exchange exchange(rank, config);
          EXPECT_EQ(exchange.config().backend, expected);
          EXPECT_EQ(exchange.config().memory, MemoryKind::host);
          EXPECT_EQ(exchange.config().hops, several ? Hops::two : Hops::one);
          EXPECT_EQ(exchange.config().reduction_level, several ? ReductionLevel::node : ReductionLevel::rank);
        },
        hosts));
  }
}

TEST(AutomaticBackend, ANamedEngineTakesCollectiveOnOneHostToo) {
  const ThreadEngine engine(2);
  expect_none(run_ranks(engine, 2, [](const Rank& rank) {
    Config config = kConfig;
    config.engine = EngineKind::custom;
    EXPECT_EQ(Exchange(rank, config).config().backend, BackendKind::collective);
  }));
}

TEST(AutomaticBackend, HostsWithoutAnEngineAreToldOfIt) {
  for (const std::string& error : run_ranks(
           2, [](int) { return EngineFunctions{}; }, [](const Rank& rank) { Exchange(rank, kConfig); },
           {0, 1}))
    EXPECT_NE(error.find("backend collective: this group has no engine"), std::string::npos) << error;
}

// Which backend it is depends on the build and the machine.
TEST(AutomaticBackend, DeviceMemoryOnSeveralHostsNamesWhatEachCandidateLacks) {
  const ThreadEngine engine(2);
  const auto errors = run_ranks(
      2, [&](int rank) { return engine.functions(rank); },
      [](const Rank& rank) {
        Config config = kConfig;
        config.memory = MemoryKind::device;
        try {
          const Config chosen = agree_on_config(rank, config);
          EXPECT_EQ(chosen.memory, MemoryKind::device);
          EXPECT_TRUE(chosen.backend == BackendKind::nvshmem || chosen.engine == EngineKind::nccl);
          EXPECT_EQ(chosen.reduction_level, ReductionLevel::node);
        } catch (const UnsupportedError& error) {
          const std::string text = error.what();
          for (const char* candidate : {"nvshmem: rank 0: ", "collective over NCCL: rank 0: "})
            EXPECT_NE(text.find(candidate), std::string::npos) << text;
        }
      },
      {0, 1});
  expect_none(errors);
}

TEST(AutomaticBackend, RanksWithDifferentMemoryAreRefused) {
  const ThreadEngine engine(2);
  for (const std::string& error : run_ranks(
           2, [&](int rank) { return engine.functions(rank); },
           [](const Rank& rank) {
             Config config = kConfig;
             if (rank.index() == 1) config.memory = MemoryKind::device;
             agree_on_config(rank, config);
           },
           {0, 1}))
    EXPECT_NE(error.find("configurations differ: "), std::string::npos) << error;
}

}  // namespace
}  // namespace ferry::test
