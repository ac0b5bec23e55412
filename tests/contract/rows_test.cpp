// Received rows: order, offsets, padding, capacity.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "harness/harness.hpp"
#include "harness/jitter.hpp"
#include "repeats.hpp"

namespace ferry::contract {
namespace {

TestCase row_case(TestCase c, int ranks) {
  c.ranks = ranks;
  c.config.experts = 5 * ranks + 1;
  c.config.top_k = 4;
  c.config.max_tokens = 16;
  c.masked = 0.1;
  return c;
}

TEST_P(Contract, ExpertRowsHoldTheirTokens) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      TestCase c = row_case(small_case(ranks), ranks);
      c.config.layout = layout;
      add(c);
      c.config.alignment = 4;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, GroupsFollowLocalExpertOrder) {
  TestCase c = small_case(1);
  c.ranks = 2;
  c.config.experts = 5;
  c.config.placement = Placement::table({{1, 1}, {0, 1}, {1, 0}, {0, 0}, {1, 2}}, 2, 17);
  c.routing = Routing::one_expert;  // every other group is empty
  const StepInputs step = make_inputs(c);
  EXPECT_EQ(step.positions.ranks[0].group_expert, (std::vector<std::int32_t>{3, 1}));
  EXPECT_EQ(step.positions.ranks[1].group_expert, (std::vector<std::int32_t>{2, 0, 4}));
  run_case(c, step);
}

TEST_P(Contract, AlignmentAndPadding) {
  for (const int ranks : {1, 3, 8}) {
    for (const int alignment : {1, 4, 8, 16, 32, 64, 128, 256}) {
      for (const bool zero : {false, true}) {
        TestCase c = row_case(small_case(alignment), ranks);
        c.config.alignment = alignment;
        c.config.zero_padding = zero;
        c.config.layout = zero ? Layout::expert_padded : Layout::expert_major;
        c.config.format = alignment % 3 == 1 ? Format::fp8_e4m3({.column_major = true}) : Format::bf16();
        add(c);
        c.config.layout = Layout::expert_major;
        add(c);
      }
    }
  }
  run_added();
}

TEST_P(Contract, EachTokenIsSentOncePerRank) {
  TestCase c = small_case(1);
  c.ranks = 4;
  c.config.experts = 32;
  c.config.top_k = 8;
  c.config.max_tokens = 64;
  c.config.hidden = 1024;
  c.full = true;
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun(exchange, c, step).run();
    const WireCounts wire = exchange.wire_counts();
    const auto messages = static_cast<double>(wire.dispatch_messages);
    const oracle::Travel travel = travel_of(exchange);
    double expected = messages * (2 * 1024 + 8 + 8 * 8);
    const auto bytes = static_cast<double>(wire.dispatch_bytes);
    if (travel.two_hops && exchange.config().memory == MemoryKind::device) {
      // Slot metadata is 16 bytes. To another node it travels once for each rank there, with 16 bytes more.
      const auto between = static_cast<double>(wire.between_nodes.dispatch_messages);
      double entries = 0;
      for (int to = 0; to < c.ranks; ++to) {
        if (travel.topology.node_of(to) != travel.topology.node_of(rank.index()))
          entries += step.positions.tokens_between[rank.index() * c.ranks + to];
      }
      expected = messages * 2 * 1024 + (messages - between) * 16 * 8 + entries * 16 * 9;
    }
    require(bytes > 0.97 * expected && bytes < 1.03 * expected, bytes, " bytes, expected about ", expected);
    require_equal(wire.dispatch_messages,
                  oracle::dispatch_messages(step.positions, travel, rank.index()).all(), "messages");
  });
}

TEST_P(Contract, RankMajorRows) {
  for (const int ranks : kGroupSizes) {
    for (const bool weighted : {true, false}) {
      TestCase c = row_case(small_case(ranks), ranks);
      c.config.layout = Layout::rank_major;
      c.weights_from = WeightsFrom::none;
      c.weighted = weighted;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, RowOrderIsTheSameUnderJitter) {
  TestCase c = row_case(small_case(1), 4);
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  if (!Jitter::kAvailable) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const Jitter jitter;
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    for (int repeat = 0; repeat < test::repeats(100); ++repeat)
      dispatch_and_combine(exchange, c, step, expert_outputs);
  });
}

// Few tokens with wide rows: several warps of a GPU share a row, and must not use a scale of an earlier call.
TEST_P(Contract, QuantisedRowsAreTheSameUnderJitter) {
  if (!Jitter::kAvailable) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const Jitter jitter;
  for (const bool packed : {false, true}) {
    TestCase c = row_case(small_case(1), 4);
    c.config.max_tokens = 8;
    c.config.hidden = packed ? 5120 : 7168;
    c.config.format = Format::fp8_e4m3({.power_of_two = packed, .packed = packed});
    const std::vector<PreparedStep> steps = prepare_steps(c, test::repeats(10));
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      for (const PreparedStep& one : steps) dispatch_and_combine(exchange, c, one.step, one.expert_outputs);
    });
  }
}

TEST_P(Contract, RowsOverCapacityAreDroppedInOrder) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      TestCase c = row_case(small_case(ranks), ranks);
      c.config.layout = layout;
      c.config.alignment = layout == Layout::rank_major ? 1 : 4;
      c.config.capacity = layout == Layout::expert_padded ? 4 : 12;
      c.full = true;
      c.row_values = layout != Layout::rank_major;
      if (layout == Layout::rank_major) c.weights_from = WeightsFrom::none;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, OverflowErrorNamesTheNeededCapacity) {
  TestCase c = small_case(1);
  c.config.check_calls = true;
  c.config.experts = 2;
  c.config.top_k = 1;
  c.config.layout = Layout::expert_padded;
  c.config.alignment = 2;
  c.config.capacity = 2;
  const StepInputs step = inputs_from_ids(c, {{1, 1, 1}, {1, 0, 1}});  // 5 rows for expert 1, on rank 1
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    bool thrown = false;
    try {
      dispatch.call();
    } catch (const OverflowError& error) {
      thrown = true;
      require_equal(error.overflow.rank, 1, "rank");
      require_equal(error.overflow.capacity, 2, "capacity");
      require_equal(error.overflow.needed, 6, "needed");
      require_equal(error.overflow.dropped, 3, "dropped");
      require(std::string(error.what()) ==
                  "capacity of 2 rows for each expert exceeded: the fullest expert of rank 1 needs 6; routes "
                  "dropped on all ranks: 3; configure capacity = 6 or more; 0 has room for any routing, with "
                  "repeats = true also for tokens that list an expert more than once",
              "message: ", error.what());
    }
    require(thrown, "no overflow was reported");
    require_equal(exchange.last_dispatch_result().counts[0], rank.index() == 0 ? 1 : 2, "rows kept");
  });
}

// Every token of two ranks lists an expert of rank 0 twice: 8 routes where the default capacity holds 4.
TEST_P(Contract, OverflowByRepeatedExpertsNamesTheRemedy) {
  TestCase c = small_case(1);
  c.config.check_calls = true;
  c.config.experts = 2;
  c.config.top_k = 2;
  c.config.max_tokens = 2;
  c.config.capacity = 0;
  const StepInputs step = inputs_from_ids(c, {{0, 0, 0, 0}, {0, 0, 0, 0}});
  const auto dispatch_text = [&](const Rank& rank, const Config& config) {
    SyncExchange exchange(rank, config);
    DispatchRun dispatch(exchange, c, step);
    try {
      exchange.dispatch(dispatch.tokens(), dispatch.ids(), dispatch.weights());
    } catch (const OverflowError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  run(c.ranks, describe(c), [&](const Rank& rank) {
    Config config = c.config;
    require_equal(
        dispatch_text(rank, config),
        std::string("capacity of 4 rows exceeded: rank 0 needs 8; routes dropped on all ranks: 4; "
                    "some token lists an expert more than once: configure repeats = true, with which "
                    "the default capacity has room for that"),
        "message");
    config.repeats = true;
    require_equal(dispatch_text(rank, config), std::string(), "message with repeats");
    config.layout = Layout::rank_major;
    config.capacity = 3;
    require_equal(
        dispatch_text(rank, config),
        std::string("capacity of 3 rows exceeded: rank 0 needs 4; rows dropped on all ranks: 1; "
                    "configure capacity = 4 or more; 0 has room for any routing, with repeats = true "
                    "also for tokens that list an expert more than once"),
        "message of rank_major");
  });
}

TEST_P(Contract, WeightBitsAreUnchanged) {
  for (const int ranks : kGroupSizes) {
    TestCase c = row_case(small_case(ranks), ranks);
    c.weights_from = WeightsFrom::none;
    StepInputs step = make_inputs(c);
    for (oracle::RankInputs& inputs : step.inputs.ranks) {  // any bits: NaN with a payload, -0, denormals
      Random random(c.seed);
      for (float& weight : inputs.weights) {
        const auto bits = static_cast<std::uint32_t>(random.chance(0.2) ? 0x7FC12345 : random.next());
        std::memcpy(&weight, &bits, sizeof weight);
      }
    }
    run_case(c, step);
  }
}

TEST_P(Contract, RowsPastTheTotalAreNeverRead) {
  // Everything a combine must not read is NaN, behind the last row too.
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact, Reduction::unreduced}) {
      TestCase c = row_case(small_case(ranks), ranks);
      c.config.alignment = 16;
      c.reduction = c.config.reduction = reduction;
      if (reduction == Reduction::unreduced) c.weights_from = WeightsFrom::none;
      add(c);
    }
  }
  run_added();
}

}  // namespace
}  // namespace ferry::contract
