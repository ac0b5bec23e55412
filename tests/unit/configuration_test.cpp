#include "exchange/configuration.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <type_traits>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "unit/valid_config.hpp"

namespace ferry {
namespace {

// The message with which complete_config() refuses the configuration; "" if it does not.
std::string refusal(const Config& config) {
  try {
    complete_config(config, kRanks);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Configuration, DefaultsToABlockPlacement) {
  EXPECT_EQ(complete_config(valid_config(), kRanks).placement, Placement::blocks(10, kRanks));
}

TEST(Configuration, RefusesWithTheNumbers) {
  struct Bad {
    Config config;
    const char* message;
  };
  auto with = [](auto change) {
    Config config = valid_config();
    change(config);
    return config;
  };
  const Bad bad[] = {
      {with([](Config& c) { c.experts = 0; }), "experts = 0"},
      {with([](Config& c) { c.top_k = 33; }), "top_k = 33"},
      {with([](Config& c) { c.top_k = 0; }), "top_k = 0"},
      {with([](Config& c) { c.hidden = -8; }), "hidden = -8"},
      {with([](Config& c) { c.hidden = 7; }), "14 bytes"},
      {with([](Config& c) { c.max_tokens = 0; }), "max_tokens = 0"},
      {with([](Config& c) { c.alignment = 0; }), "alignment = 0"},
      {with([](Config& c) { c.lanes = 0; }), "lanes = 0"},
      {with([](Config& c) { c.deadline = 0; }), "deadline = 0"},
      {with([](Config& c) { c.window = -1; }), "window = -1"},
      {with([](Config& c) {
         c.backend = BackendKind::cpu;
         c.memory = MemoryKind::device;
       }),
       "the backend cpu works on host memory"},
      {with([](Config& c) {
         c.backend = BackendKind::cuda;
         c.memory = MemoryKind::host;
       }),
       "the backend cuda works on device memory"},
      {with([](Config& c) {
         c.backend = BackendKind::nvshmem;
         c.memory = MemoryKind::host;
       }),
       "the backend nvshmem works on device memory"},
      {with([](Config& c) {
         c.backend = BackendKind::cpu;
         c.engine = EngineKind::nccl;
       }),
       "the backend is cpu, and memory is automatic: pass the backend collective"},
      {with([](Config& c) {
         c.backend = BackendKind::collective;
         c.engine = EngineKind::nccl;
         c.memory = MemoryKind::host;
       }),
       "and memory is host: pass memory automatic or device"},
      {with([](Config& c) { c.backend = BackendKind::reference; }),
       "backend = reference (0), must be one of automatic, cpu, cuda, nvshmem, collective"},
      {with([](Config& c) { c.deadline = std::numeric_limits<double>::quiet_NaN(); }), "deadline = "},
      {with([](Config& c) { c.alignment = 8, c.capacity = 20; }), "capacity = 20"},
      {with([](Config& c) { c.alignment = 8, c.layout = Layout::rank_major; }), "alignment = 8"},
      {with([](Config& c) { c.reduction = Reduction::exact, c.layout = Layout::rank_major; }),
       "reduction exact, must be partial with rank_major"},
      {with([](Config& c) { c.placement = Placement::blocks(10, 3); }), "10 experts on 3 ranks"},
      {with([](Config& c) { c.placement = Placement::blocks(9, 4); }), "9 experts on 4 ranks"},
      {with([](Config& c) { c.max_tokens = 1 << 24, c.top_k = 32, c.experts = 1024; }), "rows"},
  };
  for (const Bad& each : bad) {
    EXPECT_NE(refusal(each.config).find(each.message), std::string::npos)
        << each.message << " in: " << refusal(each.config);
  }
  EXPECT_EQ(refusal(valid_config()), "");
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
  const auto refused = [](auto change) {
    Config config = valid_config();
    config.shared_experts = 2;
    change(config);
    return refusal(config);
  };
  EXPECT_NE(refused([](Config& c) { c.shared_experts = kMaxSharedExperts + 1; }).find("shared_experts = 17"),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) { c.layout = Layout::rank_major; }).find("must be 0 with rank_major"),
            std::string::npos);
  EXPECT_EQ(refused([](Config& c) { c.format = Format::raw({16}); }), "");
  EXPECT_EQ(refused([](Config&) {}), "");
}

TEST(Configuration, ReplicatedInputIsPartialAtLevelRank) {
  const auto refused = [](auto change) {
    Config config = valid_config();
    config.input = Input::replicated;
    change(config);
    return refusal(config);
  };
  const std::string only = "must be partial at level rank";
  EXPECT_NE(refused([](Config& c) { c.reduction = Reduction::exact; }).find(only), std::string::npos);
  EXPECT_NE(refused([](Config& c) { c.reduction_level = ReductionLevel::node; }).find(only),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) { c.shared_split = 1; }).find("must be 0 without shared_experts"),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) {
              c.shared_experts = 1;
              c.shared_split = kRanks + 1;
            }).find("shared_split = 5, must be 0 to 4: it is how many of the ranks divide"),
            std::string::npos);
  EXPECT_NE(refused([](Config& c) {
              c.input = Input::own;
              c.shared_experts = c.shared_split = 1;
            }).find("must be 0 unless input is replicated"),
            std::string::npos);
  EXPECT_EQ(refused([](Config& c) { c.shared_experts = c.shared_split = 1; }), "");
  Config config = valid_config();
  config.input = Input::replicated;
  EXPECT_EQ(chosen_level(config, Topology({0, 1})), ReductionLevel::rank);
}

TEST(Configuration, GatherIsPartialAtLevelRank) {
  const auto refused = [](auto change) {
    Config config = valid_config();
    config.transfer = Transfer::gather;
    change(config);
    return refusal(config);
  };
  const auto expect = [&](const char* words, auto change) {
    EXPECT_NE(refused(change).find(words), std::string::npos) << refused(change);
  };
  expect("reduction exact and reduction_level automatic, must be partial at level rank",
         [](Config& c) { c.reduction = Reduction::exact; });
  expect("reduction_level node, must be partial",
         [](Config& c) { c.reduction_level = ReductionLevel::node; });
  expect("with layout rank_major", [](Config& c) { c.layout = Layout::rank_major; });
  expect("with input replicated, must be own", [](Config& c) { c.input = Input::replicated; });
  expect("with hops two, must be one", [](Config& c) { c.hops = Hops::two; });
  expect("the backend nvshmem has only routed", [](Config& c) { c.backend = BackendKind::nvshmem; });
  EXPECT_EQ(refused([](Config& c) { c.backend = BackendKind::cuda; }), "");
  EXPECT_EQ(refused([](Config& c) {
              c.backend = BackendKind::collective;
              c.memory = MemoryKind::device;
            }),
            "");
  EXPECT_EQ(refused([](Config& c) { c.shared_experts = 1; }), "");
  Config config = valid_config();
  config.transfer = Transfer::gather;
  EXPECT_EQ(chosen_level(config, Topology({0, 1})), ReductionLevel::rank);
  config.backend = BackendKind::collective;
  EXPECT_EQ(chosen_hops(config, Topology({0, 0, 1})), Hops::one);
}

TEST(Configuration, UnknownEnumeratorsAreRefused) {
  const auto changed = [](auto Config::* field, int number) {
    Config config = valid_config();
    using Enum = std::remove_reference_t<decltype(config.*field)>;
    config.*field = static_cast<Enum>(number);
    return refusal(config);
  };
  for (const int number : {-1, 3, 1 << 20}) {
    EXPECT_NE(changed(&Config::layout, number).find(str("layout = ", number)), std::string::npos);
    EXPECT_NE(changed(&Config::combine_type, number).find(str("combine_type = ", number)), std::string::npos);
    EXPECT_NE(changed(&Config::transfer, number).find(str("transfer = ", number)), std::string::npos);
    EXPECT_NE(changed(&Config::reduction, number).find(str("reduction = ", number)), std::string::npos);
    EXPECT_NE(changed(&Config::reduction_level, number).find(str("reduction_level = ", number)),
              std::string::npos);
  }
  Config config = valid_config();
  config.format.kind = static_cast<FormatKind>(9);
  EXPECT_NE(refusal(config).find("kind 9"), std::string::npos) << refusal(config);
  config = valid_config();
  config.backend = static_cast<BackendKind>(9);
  EXPECT_NE(refusal(config).find("backend = unknown (9), must be one of automatic, cpu"), std::string::npos)
      << refusal(config);
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

}  // namespace
}  // namespace ferry
