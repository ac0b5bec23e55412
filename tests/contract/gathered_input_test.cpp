// Transfer::gather: dispatch sends every token to every rank, and each rank returns one sum for it. Rows,
// plans and results are those of a routed exchange.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

TestCase gathered_case(TestCase c, int ranks) {
  c.ranks = ranks;
  c.config.experts = 16;
  c.config.top_k = 4;
  c.config.max_tokens = 9;
  c.config.hidden = 80;
  c.config.alignment = 2;
  c.config.transfer = Transfer::gather;
  if (c.config.backend == BackendKind::cuda) c.config.deadline = 6;
  c.masked = 0.2;
  c.masked_tokens = 0.2;
  return c;
}

constexpr const char* kRefused = "refused in two hops, and in kernels for large groups";

TEST_P(Contract, GatheredInputInEveryFormatAndForm) {
  if (!GetParam().has_gathered_input()) GTEST_SKIP() << kRefused;
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      TestCase c = gathered_case(small_case(ranks), ranks);
      c.config.layout = layout;
      c.config.format = ranks % 2 == 0 ? Format::fp8_e4m3() : Format::bf16();
      run_sequences(GetParam(), {c});  // also by plan, route values, the messages and load counts
      c.split_phases = c.row_values = true;
      c.result = DType::fp32;
      add(c);
      c.split_phases = false;
      c.weights_from = WeightsFrom::topk_weights;
      c.config.shared_experts = 2;
      add(c);
      c.shared_outputs = c.split_phases = true;
      c.weights_from = WeightsFrom::row_weights;
      add(c);
    }
  }
  run_added();
}

// Each rank adds one sum for each rank: more than the top_k of any configuration.
TEST_P(Contract, GatheredInputOfManyRanks) {
  if (!GetParam().has_gathered_input() || GetParam().rank_kind != RankKind::threads)
    GTEST_SKIP() << "threads only";
  const int ranks = GetParam().on_device() ? 20 : 36;  // kernels take at most 32
  TestCase c = gathered_case(small_case(36), ranks);
  c.config.experts = 40;
  c.config.top_k = 3;
  c.config.max_tokens = 3;
  c.config.shared_experts = 1;
  EXPECT_TRUE(run_sequences(GetParam(), {c}));
}

TEST_P(Contract, GatheredInputSendsEveryTokenToEveryRank) {
  if (!GetParam().has_gathered_input()) GTEST_SKIP() << kRefused;
  TestCase c = gathered_case(small_case(5), 4);
  c.tokens = {3, 0, 5, 1};
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  TestCase routed = c;
  routed.config.transfer = Transfer::routed;
  routed.config.reduction_level = ReductionLevel::rank;
  const StepInputs routed_step = make_inputs(routed);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config), plain(rank, routed.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, outputs),
               plain_plan = dispatch_and_combine(plain, routed, routed_step, outputs);
    for (int source = 0; source < 4; ++source) {
      for (int to = 0; to < 4; ++to) {
        require_equal(plan.tokens_between()[source * 4 + to], c.tokens[source], "tokens from rank ", source,
                      " to rank ", to);
      }
    }
    require_equal(plan.total(), plain_plan.total(), "rows");
    const WireCounts wire = exchange.wire_counts();
    const int mine = c.tokens[rank.index()];
    require_equal(wire.dispatch_messages, std::int64_t{3} * mine, "dispatch messages");
    require_equal(wire.combine_messages, std::int64_t{9} - mine, "combine messages");
    const std::int64_t values = (9 - mine) * std::int64_t{80 * 2};
    // Over an engine of device memory a row also says where it belongs.
    if (GetParam().over_device_engine()) {
      require(wire.combine_bytes >= values && wire.combine_bytes % 16 == 0, "combine bytes");
    } else {
      require_equal(wire.combine_bytes, values, "combine bytes");
    }

    // A plan of the one is none of the other.
    CombineRun combine(plain, routed, routed_step, outputs, plan, nullptr);
    require(!usage_error([&] { combine.call(); }).empty(), "a plan of another transfer was accepted");
  });
}

TEST_P(Contract, GatheredInputHasTheRoutedGradients) {
  if (!GetParam().has_gathered_input()) GTEST_SKIP() << kRefused;
  TestCase c = gathered_case(small_case(6), 3);
  c.type = c.outputs = c.config.combine_type = DType::fp32;
  c.config.format = Format::fp32();
  c.apply_weights = c.dots = true;
  TestCase routed = c;
  routed.config.transfer = Transfer::routed;
  routed.config.reduction_level = ReductionLevel::rank;
  run(c.ranks, describe(c), [&](Rank rank) {
    std::vector<float> of_weights[2];
    for (const TestCase& either : {routed, c}) {
      const StepInputs step = make_inputs(either), gradients = with_new_values(either, step, 1);
      SyncExchange exchange(rank, either.config);
      const Plan plan = dispatch_and_combine(exchange, either, step, make_expert_outputs(either, step));
      const auto values = static_cast<std::size_t>(step.inputs.ranks[rank.index()].tokens) * 4;
      GuardedBuffer d_weights(static_cast<std::int64_t>(values * sizeof(float)));
      DispatchRun(exchange, either, gradients)
          .run_backward(plan, d_weights.as<float>());  // compares the rows
      d_weights.require_guards("d_weights");
      of_weights[either.config.transfer == Transfer::gather].assign(d_weights.as<float>(),
                                                                    d_weights.as<float>() + values);
    }
    require(of_weights[0] == of_weights[1], "the gradients of the weights differ");
  });
}

TEST_P(Contract, GatherIsRefusedByNameWhereItIsNotAvailable) {
  const TestCase c = gathered_case(small_case(7), 3);
  Config config = c.config;
  config.backend = GetParam().backend;
  config.memory = GetParam().memory;
  config.engine = GetParam().engine;
  config.hops = GetParam().hops;
  run(c.ranks, describe(c), [&](Rank rank) {
    if (GetParam().has_gathered_input()) {
      Config differs = config;
      if (rank.index() == 1) differs.transfer = Transfer::routed;
      differs.reduction_level = ReductionLevel::rank;
      differs.hops = Hops::one;
      require_refused("transfer is gather on rank 0 and routed on rank 1",
                      [&] { SyncExchange exchange(rank, differs); });
      SyncExchange exchange(rank, config);
      const StepInputs step = make_inputs(c);
      const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
      const Plan plan = dispatch_and_combine(exchange, c, step, outputs);
      CombineRun combine(exchange, c, step, outputs, plan, nullptr);
      if (rank.index() == 1) combine.options().reduction = Reduction::exact;
      require_refused("transfer = gather has the reduction partial only", [&] { combine.call(); });
      dispatch_and_combine(exchange, c, step, outputs);
      return;
    }
    try {
      SyncExchange exchange(rank, config);
    } catch (const Error& error) {
      const std::string text = error.what();
      require(text.find("transfer = gather") != std::string::npos, text);
      return;
    }
    require(false, "gather was accepted");
  });
}

}  // namespace
}  // namespace ferry::contract
