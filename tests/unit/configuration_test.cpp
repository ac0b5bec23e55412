#include "exchange/configuration.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"

namespace ferry {
namespace {

constexpr int kRanks = 4;

// A configuration without mistakes.
Config valid_config() {
  return {.experts = 10, .top_k = 4, .hidden = 64, .max_tokens = 16};
}

// The message with which complete_config() refuses the configuration; "" if it does not.
std::string refusal(const Config& config) {
  try {
    complete_config(config, kRanks);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Expects that valid_config() with this change is refused in these words; "": that it is accepted.
void expect_refusal(const std::string& words, const std::function<void(Config&)>& change) {
  Config config = valid_config();
  change(config);
  const std::string text = refusal(config);
  EXPECT_TRUE(words.empty() ? text.empty() : text.find(words) != std::string::npos)
      << "'" << words << "' in: " << text;
}

TEST(Configuration, DefaultsToABlockPlacement) {
  EXPECT_EQ(complete_config(valid_config(), kRanks).placement, Placement::blocks(10, kRanks));
}

TEST(Configuration, RefusesWithTheNumbers) {
  expect_refusal("experts = 0", [](Config& c) { c.experts = 0; });
  expect_refusal("top_k = 33", [](Config& c) { c.top_k = 33; });
  expect_refusal("top_k = 0", [](Config& c) { c.top_k = 0; });
  expect_refusal("hidden = -8", [](Config& c) { c.hidden = -8; });
  expect_refusal("14 bytes", [](Config& c) { c.hidden = 7; });
  expect_refusal("max_tokens = 0", [](Config& c) { c.max_tokens = 0; });
  expect_refusal("alignment = 0", [](Config& c) { c.alignment = 0; });
  expect_refusal("lanes = 0", [](Config& c) { c.lanes = 0; });
  expect_refusal("deadline = 0", [](Config& c) { c.deadline = 0; });
  expect_refusal("window = -1", [](Config& c) { c.window = -1; });
  expect_refusal("the backend cpu works on host memory", [](Config& c) {
    c.backend = BackendKind::cpu;
    c.memory = MemoryKind::device;
  });
  expect_refusal("the backend cuda works on device memory", [](Config& c) {
    c.backend = BackendKind::cuda;
    c.memory = MemoryKind::host;
  });
  expect_refusal("the backend nvshmem works on device memory", [](Config& c) {
    c.backend = BackendKind::nvshmem;
    c.memory = MemoryKind::host;
  });
  expect_refusal("the backend is cpu, and memory is automatic: pass the backend collective", [](Config& c) {
    c.backend = BackendKind::cpu;
    c.engine = EngineKind::nccl;
  });
  expect_refusal("and memory is host: pass memory automatic or device", [](Config& c) {
    c.backend = BackendKind::collective;
    c.engine = EngineKind::nccl;
    c.memory = MemoryKind::host;
  });
  expect_refusal("backend = reference (0), must be one of automatic, cpu, cuda, nvshmem, collective",
                 [](Config& c) { c.backend = BackendKind::reference; });
  expect_refusal("deadline = ", [](Config& c) { c.deadline = std::numeric_limits<double>::quiet_NaN(); });
  expect_refusal("capacity = 20", [](Config& c) { c.alignment = 8, c.capacity = 20; });
  expect_refusal("alignment = 8", [](Config& c) { c.alignment = 8, c.layout = Layout::rank_major; });
  expect_refusal("reduction exact, must be partial with rank_major",
                 [](Config& c) { c.reduction = Reduction::exact, c.layout = Layout::rank_major; });
  expect_refusal("10 experts on 3 ranks", [](Config& c) { c.placement = Placement::blocks(10, 3); });
  expect_refusal("9 experts on 4 ranks", [](Config& c) { c.placement = Placement::blocks(9, 4); });
  expect_refusal("rows", [](Config& c) { c.max_tokens = 1 << 24, c.top_k = 32, c.experts = 1024; });
  expect_refusal("", [](Config&) {});
}

TEST(Configuration, RefusesIndexedRowsOnDeviceMemory) {
  const auto refused = [](BackendKind backend, MemoryKind memory, EngineKind engine) {
    expect_refusal("layout expert_indexed on device memory", [&](Config& c) {
      c.layout = Layout::expert_indexed;
      c.backend = backend;
      c.memory = memory;
      c.engine = engine;
    });
  };
  for (const MemoryKind memory : {MemoryKind::automatic, MemoryKind::device}) {
    refused(BackendKind::cuda, memory, EngineKind::automatic);
    refused(BackendKind::nvshmem, memory, EngineKind::automatic);
    refused(BackendKind::collective, memory, EngineKind::nccl);
    refused(BackendKind::automatic, memory, EngineKind::nccl);
  }
  for (const BackendKind backend : {BackendKind::automatic, BackendKind::collective})
    refused(backend, MemoryKind::device, EngineKind::automatic);
}

TEST(Configuration, DefaultCapacityHoldsAnyRoutingWithoutRepeats) {
  // 10 experts on 4 ranks: 3, 3, 2, 2. A token has at most min(4, local experts) routes to a rank.
  Config config = complete_config(valid_config(), kRanks);
  EXPECT_EQ(row_capacity(config, 0), kRanks * 16 * 3);
  EXPECT_EQ(row_capacity(config, 3), kRanks * 16 * 2);
  config.alignment = 8;
  EXPECT_EQ(row_capacity(config, 0), (kRanks * 16 * 3 + 3 * 7) / 8 * 8);
  config.alignment = 1;
  config.repeats = true;
  EXPECT_EQ(row_capacity(config, 0), kRanks * 16 * 4);
  config.layout = Layout::expert_padded;
  EXPECT_EQ(group_capacity(config, 0), kRanks * 16 * 4);
  EXPECT_EQ(row_capacity(config, 3), kRanks * 16 * 4 * 2);
  config.layout = Layout::rank_major;
  EXPECT_EQ(row_capacity(config, 2), kRanks * 16);
}

TEST(Configuration, SizesStayWithinTheirBound) {
  // The bound: 2 * lanes * (R*T messages + T*min(K, R) rows). A message holds the values, one head, K ids and
  // K weights.
  const Config config{.experts = 256, .top_k = 8, .hidden = 7168, .max_tokens = 4096};
  const Sizes sizes = size_of(config, 8);
  const double message = 7168 * 2, staging = 2.0 * (8.0 * 4096 * message + 4096.0 * 8 * message);
  const auto symmetric = static_cast<double>(sizes.dispatch_staging + sizes.combine_staging + sizes.signals);
  EXPECT_NEAR(symmetric / staging, 1.0, 0.05) << symmetric << " bytes against " << staging;
  const std::int64_t received = capacity_of(config, 8) * 7168 * 2;
  EXPECT_GE(sizes.results, received);
  EXPECT_LE(sizes.results, received + 64 * 1024);

  Config exact = config;
  exact.reduction = Reduction::exact;
  const auto rows = static_cast<double>(size_of(exact, 8).combine_staging);
  EXPECT_NEAR(rows / (2.0 * 4096 * 8 * message), 1.0, 0.05);
}

// Only scales in columns need rows that align them, not the values beside.
TEST(Configuration, SizesOfSmallGroupsAreThoseOfTheirRows) {
  const Config config{.experts = 32,
                      .top_k = 1,
                      .hidden = 7168,
                      .max_tokens = 1,
                      .layout = Layout::expert_padded,
                      .capacity = 1};
  const std::int64_t rows = 32 * 7168 * 2;
  EXPECT_GE(size_of(config, 1).results, rows);
  EXPECT_LE(size_of(config, 1).results, rows + rows / 8);
}

TEST(Configuration, SizesThatOverflowAreRefused) {
  Config config{.experts = 1 << 20, .top_k = 32, .hidden = 1 << 24, .max_tokens = 1 << 24};
  config.capacity = 1 << 20;
  config.lanes = 64;
  config.combine_type = DType::fp32;
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    config.reduction = reduction;
    EXPECT_NE(refusal(config).find("more than can be addressed"), std::string::npos) << refusal(config);
  }
  config.capacity = 0;  // gives a rank more rows than an int32 can number
  EXPECT_NE(refusal(config).find("at most 2147483647 can be numbered"), std::string::npos);
}

TEST(Configuration, SharedExpertsNeedAnExpertLayout) {
  expect_refusal("shared_experts = 17", [](Config& c) { c.shared_experts = kMaxSharedExperts + 1; });
  expect_refusal("must be 0 with rank_major", [](Config& c) {
    c.shared_experts = 2;
    c.layout = Layout::rank_major;
  });
  expect_refusal("", [](Config& c) {
    c.shared_experts = 2;
    c.format = Format::raw({16});
  });
  expect_refusal("", [](Config& c) { c.shared_experts = 2; });
}

TEST(Configuration, ReplicatedInputIsPartialAtLevelRank) {
  const auto expect = [](const char* words, auto change) {
    expect_refusal(words, [&](Config& c) {
      c.input = Input::replicated;
      change(c);
    });
  };
  const char* const only = "must be partial at level rank";
  expect(only, [](Config& c) { c.reduction = Reduction::exact; });
  expect(only, [](Config& c) { c.reduction_level = ReductionLevel::node; });
  expect("must be 0 without shared_experts", [](Config& c) { c.shared_split = 1; });
  expect("shared_split = 5, must be 0 to 4: it is how many of the ranks divide", [](Config& c) {
    c.shared_experts = 1;
    c.shared_split = kRanks + 1;
  });
  expect("must be 0 unless input is replicated", [](Config& c) {
    c.input = Input::own;
    c.shared_experts = c.shared_split = 1;
  });
  expect("", [](Config& c) { c.shared_experts = c.shared_split = 1; });
  Config config = valid_config();
  config.input = Input::replicated;
  EXPECT_EQ(chosen_level(config, Topology({0, 1})), ReductionLevel::rank);
}

TEST(Configuration, GatherIsPartialAtLevelRank) {
  const auto expect = [](const char* words, auto change) {
    expect_refusal(words, [&](Config& c) {
      c.transfer = Transfer::gather;
      change(c);
    });
  };
  expect("reduction exact and reduction_level automatic, must be partial at level rank",
         [](Config& c) { c.reduction = Reduction::exact; });
  expect("reduction_level node, must be partial",
         [](Config& c) { c.reduction_level = ReductionLevel::node; });
  expect("with layout rank_major", [](Config& c) { c.layout = Layout::rank_major; });
  expect("with input replicated, must be own", [](Config& c) { c.input = Input::replicated; });
  expect("with hops two, must be one", [](Config& c) { c.hops = Hops::two; });
  expect("the backend nvshmem has only routed", [](Config& c) { c.backend = BackendKind::nvshmem; });
  expect("", [](Config& c) { c.backend = BackendKind::cuda; });
  expect("", [](Config& c) {
    c.backend = BackendKind::collective;
    c.memory = MemoryKind::device;
  });
  expect("", [](Config& c) { c.shared_experts = 1; });
  Config config = valid_config();
  config.transfer = Transfer::gather;
  EXPECT_EQ(chosen_level(config, Topology({0, 1})), ReductionLevel::rank);
  config.backend = BackendKind::collective;
  EXPECT_EQ(chosen_hops(config, Topology({0, 0, 1})), Hops::one);
}

TEST(Configuration, UnknownEnumeratorsAreRefused) {
  const auto expect = [](const char* name, auto Config::* field, int number) {
    using Enum = std::remove_reference_t<decltype(std::declval<Config&>().*field)>;
    expect_refusal(str(name, " = ", number), [&](Config& c) { c.*field = static_cast<Enum>(number); });
  };
  for (const int number : {-1, 4, 1 << 20}) {
    expect("layout", &Config::layout, number);
    expect("combine_type", &Config::combine_type, number);
    expect("transfer", &Config::transfer, number);
    expect("reduction", &Config::reduction, number);
    expect("reduction_level", &Config::reduction_level, number);
  }
  expect_refusal("kind 9", [](Config& c) { c.format.kind = static_cast<FormatKind>(9); });
  expect_refusal("backend = unknown (9), must be one of automatic, cpu",
                 [](Config& c) { c.backend = static_cast<BackendKind>(9); });
}

TEST(Configuration, SizeQueriesRefuseRanksOutOfRange) {
  for (const int rank : {-1, kRanks, 9, std::numeric_limits<int>::max()}) {
    for (const auto& query : {std::function<void()>([&] { size_of(valid_config(), kRanks, rank); }),
                              std::function<void()>([&] { capacity_of(valid_config(), kRanks, rank); })}) {
      try {
        query();
        ADD_FAILURE() << "rank " << rank << " was not refused";
      } catch (const UsageError& error) {
        EXPECT_EQ(error.what(), str("rank = ", rank, ", must be 0 to ", kRanks - 1));
      }
    }
  }
  EXPECT_THROW(size_of(valid_config(), 0), UsageError);
}

// Also in builds without CUDA, of which nothing is asked but arithmetic.
TEST(Configuration, SizesOfGpuBackendsNeedNoGpu) {
  Config config;
  config.experts = 256;
  config.top_k = 8;
  config.hidden = 7168;
  config.max_tokens = 128;
  config.backend = BackendKind::cuda;
  constexpr std::int64_t kRow = 2 * 7168;  // a multiple of a line
  const Sizes one_node = size_of(config, 16);
  EXPECT_EQ(one_node.dispatch_staging, 2 * 16 * 128 * kRow);
  EXPECT_EQ(one_node.results, std::int64_t{16} * 128 * 8 * kRow + 4096);  // padding of the parts
  EXPECT_GE(one_node.combine_staging, 2 * 128 * 8 * kRow);
  EXPECT_EQ(one_node.messages, 0);
  const Topology nodes({0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
  for (const Hops hops : {Hops::one, Hops::two}) {
    config.backend = BackendKind::nvshmem;
    config.hops = hops;
    const Sizes sizes = size_of(config, nodes);
    EXPECT_EQ(sizes.results, one_node.results);
    EXPECT_GE(sizes.messages, 2 * 16 * 128 * kRow);  // inbox and outbox
    EXPECT_GT(sizes.dispatch_staging, 0);            // windows
  }
  config.hops = Hops::automatic;
  config.backend = BackendKind::collective;
  config.memory = MemoryKind::device;
  EXPECT_GE(size_of(config, nodes).messages, 2 * 16 * 128 * kRow);
  config.memory = MemoryKind::automatic;
  config.backend = BackendKind::cuda;
  config.experts = 512;
  EXPECT_THROW(size_of(config, 512), UnsupportedError);  // more ranks than kernels serve
}

TEST(Configuration, RowOrderHashCoversWhatDecidesRowPositions) {
  const Config config = complete_config(valid_config(), kRanks);
  Config other = config;
  other.format = Format::fp16();
  other.combine_type = DType::fp32;
  EXPECT_EQ(row_order_hash(config), row_order_hash(other));
  other.alignment = 2;
  EXPECT_NE(row_order_hash(config), row_order_hash(other));
  other = config;
  other.shared_experts = 1;
  EXPECT_NE(row_order_hash(config), row_order_hash(other));
  other = config;
  other.local_slots = config.experts;
  EXPECT_NE(row_order_hash(config), row_order_hash(other));
  other = config;
  other.placement =
      Placement::table({{1, 0}, {0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}, {2, 0}, {2, 1}, {3, 0}, {3, 1}}, 4);
  EXPECT_NE(row_order_hash(config), row_order_hash(other));
}

// ---- configurations compared between ranks, and what is chosen by the nodes of the ranks

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
