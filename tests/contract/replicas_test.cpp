// Experts with replicas: the route that takes each, in every layout and form of call; counts, loads, layouts
// by expert and by replica; and where they are refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "harness/random.hpp"
#include "refusal.hpp"

namespace ferry::contract {
namespace {

constexpr Layout kEachLayout[] = {Layout::expert_major, Layout::expert_padded, Layout::rank_major};

TestCase replica_case(TestCase c, std::uint64_t number, int ranks, Layout layout) {
  c.ranks = ranks;
  c.config.layout = layout;
  c.config.experts = 3 + 5 * static_cast<int>(number % 5);
  c.config.top_k = 3;
  c.config.max_tokens = 17;
  c.config.hidden = 48;
  if (layout != Layout::rank_major) c.config.alignment = number % 2 == 0 ? 4 : 1;
  if (layout == Layout::rank_major) c.weights_from = WeightsFrom::none;
  c.masked = 0.1;
  c.duplicates = number % 3 == 0;
  c.config.repeats = c.duplicates;
  c.ids = number % 2 == 0 ? IdType::int64 : IdType::int32;
  Random random(c.seed);
  give_replicas(random, c);
  return c;
}

TEST_P(Contract, RoutesTakeTheReplicasOfTheirHashes) {
  std::uint64_t number = 0;
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : kEachLayout) {
      ++number;
      TestCase c = replica_case(small_case(number), number, ranks, layout);
      // Sources, loads, traffic, by plan, values of routes.
      run_sequences(GetParam(), {c});
      c.split_phases = true;
      c.bad_ids = 0.1;
      add(c);
      c.split_phases = false;
      c.config.format = Format::fp8_e4m3();
      if (layout != Layout::rank_major) {
        c.config.shared_experts = 2;
        c.input_scales = true;
        c.reduction = c.config.reduction = number % 2 == 0 ? Reduction::exact : Reduction::unreduced;
        c.shared_outputs = true;
        if (c.reduction == Reduction::unreduced) c.weights_from = WeightsFrom::none;
      }
      c.config.local_slots = c.config.placement.most_local_experts() + 2;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, ReplicatedInputCountsARouteToAReplicaOnce) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const Layout layout : kEachLayout) {
      TestCase c = replica_case(small_case(ranks), static_cast<std::uint64_t>(ranks), ranks, layout);
      c.config.input = Input::replicated;
      c.tokens.assign(static_cast<std::size_t>(ranks), 11);
      run_sequences(GetParam(), {c});
      const StepInputs step = make_inputs(c);
      for (std::int64_t route = 0; route < 11 * c.config.top_k; ++route) {
        int kept = 0;
        for (int rank = 0; rank < ranks; ++rank)
          kept += step.positions.route(rank, route / c.config.top_k, static_cast<int>(route % c.config.top_k))
                      .destination >= 0;
        EXPECT_EQ(kept, step.inputs.ranks[0].ids[static_cast<std::size_t>(route)] >= 0) << describe(c);
      }
    }
  }
}

// A result of `exact` from outputs that depend on the expert and the token alone.
std::vector<std::byte> exact_result(SyncExchange& exchange, const TestCase& c,
                                    const oracle::RankInputs& inputs) {
  GuardedBuffer rows = GuardedBuffer::of(inputs.parts[0]), ids = GuardedBuffer::of(inputs.ids),
                weights = GuardedBuffer::of(inputs.weights);
  const DispatchResult got = exchange.dispatch(Tokens::rows(rows.data(), inputs.tokens, c.type),
                                               ids.as<std::int64_t>(), weights.as<float>());
  const std::int64_t total = *got.total;
  std::vector<float> outputs(static_cast<std::size_t>(total * c.config.hidden));
  for (int group = 0; group < got.groups; ++group) {
    for (std::int64_t i = 0; i < got.counts[group]; ++i) {
      const std::int64_t row = got.row_offsets[group] + i;
      for (int column = 0; column < c.config.hidden; ++column) {
        outputs[static_cast<std::size_t>(row * c.config.hidden + column)] =
            static_cast<float>((got.group_expert[group] + 1) * (7 * got.source[row].token + 3 * column + 1)) /
            1021;
      }
    }
  }
  GuardedBuffer values = GuardedBuffer::of(outputs);
  GuardedBuffer result(inputs.tokens * c.config.hidden * 4);
  exchange.combine(Outputs{values.data(), DType::fp32}, got.plan, Result{result.data(), DType::fp32},
                   {.row_weights = got.weight, .reduction = Reduction::exact});
  const auto* const bytes = static_cast<const std::byte*>(result.data());
  return {bytes, bytes + result.bytes()};
}

TEST_P(Contract, ExactSumsDoNotDependOnReplicas) {
  TestCase c = replica_case(small_case(61), 4, 4, Layout::expert_major);
  c.config.format = Format::bf16();
  c.type = DType::bf16;
  c.ids = IdType::int64;
  c.weighted = true;
  c.config.combine_type = DType::fp32;
  c.config.reduction = Reduction::exact;
  c.config.capacity = 0;
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    Config blocks = c.config;
    blocks.placement = {};
    blocks.local_slots = 0;
    SyncExchange with(rank, c.config), without(rank, blocks);
    const oracle::RankInputs& inputs = step.inputs.ranks[static_cast<std::size_t>(rank.index())];
    require(exact_result(with, c, inputs) == exact_result(without, c, inputs),
            "results with and without replicas differ");
    const LoadCounts a = with.load_counts(), b = without.load_counts();
    require(a.experts == b.experts, "routes to experts with and without replicas differ");
  });
}

TEST_P(Contract, ReplicasAreRefusedByName) {
  Config config = small_case(1).config;
  config.experts = 3;
  config.top_k = 2;
  const auto place = [&](std::vector<std::vector<int>> held) {
    config.placement = Placement::replicas(std::move(held), 3);
  };
  place({{0, 1, 2}, {1}});
  run(2, "replicas", [&](Rank rank) {
    Config few = config;
    few.local_slots = 2;
    require_refused("local_slots = 2, must be 3 or more", [&] { SyncExchange(rank, few); });
    Config other = config;
    if (rank.index() == 1) other.placement = Placement::replicas({{0, 1, 2}, {2}}, 3);
    require_refused("location of expert 1 (rank.local) is 0.1+1.0 on rank 0 and 0.1 on rank 1",
                    [&] { SyncExchange(rank, other); });
  });
}

}  // namespace
}  // namespace ferry::contract
