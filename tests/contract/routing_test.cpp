// Routing inputs: top-k, masks, duplicates, bad ids, token counts, skew, placements.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/combine.hpp"
#include "repeats.hpp"

namespace ferry::contract {
namespace {

constexpr Layout kLayouts[] = {Layout::expert_major, Layout::expert_padded, Layout::rank_major};

// In rank_major, combine takes no weights.
TestCase with_layout(TestCase c, Layout layout) {
  c.config.layout = layout;
  if (layout == Layout::rank_major) c.weights_from = WeightsFrom::none;
  return c;
}

TEST_P(Contract, TopKFromOneToSixteen) {
  std::uint64_t number = 0;
  for (const int ranks : kGroupSizes) {
    for (const int top_k : {1, 2, 4, 6, 8, 16}) {
      for (const int experts : {ranks, 8 * ranks, 32 * ranks, 256}) {
        TestCase c = small_case(++number);
        c.ranks = ranks;
        c.config.top_k = top_k;
        c.config.experts = experts;
        c.config.hidden = 32;
        c.config.max_tokens = 5;
        add(c);
      }
    }
  }
  run_added();
}

TEST_P(Contract, MaskedSlots) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : kLayouts) {
      TestCase c = with_layout(small_case(ranks), layout);
      c.ranks = ranks;
      c.config.top_k = 6;
      c.config.max_tokens = 20;
      c.masked = 0.3;
      c.masked_tokens = 0.2;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, TokensWithoutExpertsGiveZero) {
  TestCase c = small_case(1);
  c.masked_tokens = 1;
  c.full = true;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  const std::vector<std::byte> zeros =
      oracle::combined(c.config, step.positions, outputs, Topology::blocks(c.ranks, 1), 0);
  EXPECT_EQ(std::ranges::count(zeros, std::byte{0}), std::ssize(zeros)) << "the result is not +0";
  run_case(c, step);
}

TEST_P(Contract, DuplicateExperts) {
  for (const int ranks : kGroupSizes) {
    TestCase c = small_case(ranks);
    c.ranks = ranks;
    c.config.top_k = 4;
    c.config.repeats = true;
    std::vector<std::vector<std::int64_t>> ids(ranks);
    for (auto& list : ids) list = {3, 3, 5, 3, 1, 1, 1, 1};
    const StepInputs step = inputs_from_ids(c, ids);
    ASSERT_EQ(step.positions.route(0, 0, 0).row + 1,
              step.positions.route(0, 0, 1).row);  // two rows, in slot order
    run_case(c, step);
    c.reduction = c.config.reduction = Reduction::exact;
    run_case(c, step);
  }
}

TEST_P(Contract, AllRoutesOfATokenOnOneRank) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : kLayouts) {
      TestCase c = with_layout(small_case(ranks), layout);
      c.ranks = ranks;
      c.config.experts = 6 * ranks;
      c.config.top_k = 6;
      c.routing = Routing::one_rank;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, BadIdsAreSkippedAndCounted) {
  for (const int ranks : kGroupSizes) {
    for (const IdType type : {IdType::int32, IdType::int64}) {
      TestCase c = small_case(ranks);
      c.ranks = ranks;
      c.config.top_k = 4;
      c.bad_ids = 0.2;
      c.ids = type;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, CheckedCallsThrowOnBadIds) {
  TestCase c = small_case(2);
  c.config.check_calls = true;
  const StepInputs step = inputs_from_ids(c, {{0, 1, 9, -1, 2, 8}, {3, 4}});
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    bool thrown = false;
    try {
      dispatch.call();
    } catch (const BadIdError& error) {
      thrown = true;
      require_equal(error.bad.rank, 0, "rank");
      require_equal(error.bad.token, 1, "token");
      require_equal(error.bad.slot, 0, "slot");
      require_equal(error.bad.id, 9, "id");
      require_equal(error.bad.count, 2, "count");
      require(std::string(error.what()).find("id 9") != std::string::npos, "message: ", error.what());
    }
    require_equal(thrown, rank.index() == 0, "thrown");
    const DispatchResult& rows = exchange.last_dispatch_result();  // the call completed despite the error
    CombineRun(exchange, c, step, expert_outputs, rows.plan, rows.weight).run();
  });
}

TEST_P(Contract, IdTypesGiveTheSameResult) {
  for (const int ranks : kGroupSizes) {
    TestCase c = small_case(ranks);
    c.ranks = ranks;
    c.config.top_k = 3;
    const StepInputs step = make_inputs(c);
    for (const IdType type : {IdType::int32, IdType::int64}) {
      c.ids = type;
      run_case(c, step);
    }
  }
}

TEST_P(Contract, RanksWithoutTokens) {
  for (const int ranks : kGroupSizes) {
    const int step =
        ranks > 4 ? 17 : 1;  // for 8 ranks a sample of the 256 subsets, with the empty and the full one
    for (int subset = 0; subset < 1 << ranks; subset += step) {
      TestCase c = with_layout(small_case(subset), kLayouts[subset % 3]);
      c.ranks = ranks;
      for (int rank = 0; rank < ranks; ++rank) c.tokens.push_back((subset >> rank) & 1 ? 5 : 0);
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, TokenCountsVaryForAThousandSteps) {
  for (const int ranks : kGroupSizes) {
    TestCase c = small_case(1);
    c.ranks = ranks;
    c.config.experts = 7;
    c.config.hidden = 16;
    c.config.max_tokens = 6;
    const std::vector<PreparedStep> steps = prepare_steps(c, test::repeats(1000));
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      for (const PreparedStep& one : steps) dispatch_and_combine(exchange, c, one.step, one.expert_outputs);
    });
  }
}

TEST_P(Contract, MaxTokensPassesAndOneMoreIsRefused) {
  TestCase c = small_case(1);
  c.ranks = 3;
  c.full = true;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    dispatch_and_combine(exchange, c, step, expert_outputs);
    DispatchRun too_many(exchange, c, step);
    if (rank.index() == 1) too_many.tokens().count = c.config.max_tokens + 1;
    const std::string text = usage_error([&] { too_many.call(); });
    for (const int number : {c.config.max_tokens + 1, c.config.max_tokens}) {
      require(text.find(str(number)) != std::string::npos, "the message lacks ", number, ": '", text, "'");
    }
    dispatch_and_combine(exchange, c, step, expert_outputs);  // the exchange is still usable
  });
}

TEST_P(Contract, ExtremeSkew) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : kLayouts) {
      for (const Routing routing : {Routing::one_expert, Routing::one_rank}) {
        TestCase c = with_layout(small_case(ranks), layout);
        c.ranks = ranks;
        c.config.experts = 4 * ranks;
        c.config.top_k = 4;
        c.config.max_tokens = 12;
        c.routing = routing;
        c.full = true;
        add(c);
      }
    }
  }
  run_added();
}

// Other placements with the same local_slots: the same groups and capacities, and empty slots at the end.
TEST_P(Contract, LocalSlotsFixGroupsAndCapacities) {
  constexpr int kRanks = 3, kExperts = 8, kSlots = 7;
  // The second leaves rank 1 without experts.
  const Placement placements[] = {
      {},
      Placement::table({{0, 0}, {2, 0}, {0, 1}, {2, 1}, {2, 2}, {0, 2}, {0, 3}, {0, 4}}, kRanks, 1),
      Placement::table({{1, 6}, {1, 0}, {1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}, {0, 0}}, kRanks, 2)};
  std::uint64_t number = 0;
  for (const Layout layout : kLayouts) {
    for (const int shared : {0, 2}) {
      if (layout == Layout::rank_major && shared > 0) continue;
      std::vector<std::int64_t> sizes;
      for (const Placement& placement : placements) {
        TestCase c = with_layout(small_case(++number), layout);
        c.ranks = kRanks;
        c.config.experts = kExperts;
        c.config.top_k = 3;
        c.config.local_slots = kSlots;
        c.config.shared_experts = shared;
        c.config.zero_padding = number % 2 == 0;
        c.config.placement = placement;
        if (layout != Layout::rank_major) c.config.alignment = 4;
        for (int rank = 0; rank < kRanks; ++rank) {
          sizes.push_back(size_of(c.config, kRanks, rank).total());
          EXPECT_EQ(sizes.back(), sizes.front()) << describe(c);
        }
        add(c);
      }
    }
  }
  run_added();
  Config config = small_case(1).config;
  config.placement = placements[2];
  config.experts = kExperts;
  config.local_slots = kSlots - 1;
  run(kRanks, "too few slots", [&](Rank rank) {
    require_refused("local_slots = 6, must be 7 or more", [&] { SyncExchange(rank, config); });
  });
}

TEST_P(Contract, RandomPlacements) {
  for (const int ranks : kGroupSizes) {
    for (int draw = 0; draw < 8; ++draw) {
      TestCase c = with_layout(small_case(draw), kLayouts[draw % 3]);
      c.ranks = ranks;
      c.config.experts = 3 * ranks + draw;  // mostly not divisible
      c.config.top_k = 3;
      Random random(c.seed);
      c.config.placement = draw_placement(random, c.config.experts, ranks);
      add(c);
    }
  }
  // One rank holds everything, the others nothing.
  TestCase c = small_case(99);
  c.ranks = 3;
  c.config.experts = 4;
  c.config.placement = Placement::table({{1, 3}, {1, 1}, {1, 0}, {1, 2}}, 3);
  add(c);
  run_added();
}

}  // namespace
}  // namespace ferry::contract
