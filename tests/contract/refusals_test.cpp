// Calls with an invalid argument on one rank: every rank throws an error that names it, and the exchange
// stays usable.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::contract {
namespace {

constexpr int kWrongRank = 1;  // passes the invalid argument

TestCase three_ranks(TestCase c) {
  c.ranks = 3;
  c.full = true;
  c.config.reduction = Reduction::exact;
  return c;
}

TEST_P(Contract, UnknownEnumValuesAreRefused) {
  const TestCase c = three_ranks(small_case(1));
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    const bool odd = rank.index() == kWrongRank;
    for (const int number : {-1, 3, 1 << 20}) {
      const std::string named = str(" = ", number, ", must be");
      const auto type = static_cast<DType>(number);
      require_refused(named, [&] {
        DispatchRun dispatch(exchange, c, step);
        if (odd) dispatch.tokens().type = type;
        dispatch.call();
      });
      require_refused(named, [&] {
        DispatchRun dispatch(exchange, c, step);
        Ids ids = dispatch.ids();
        if (odd) ids.type = static_cast<IdType>(number);
        exchange.dispatch(dispatch.tokens(), ids, dispatch.weights(), dispatch.options());
      });
      require_refused(odd ? str("kind ", number + 10) : "kind", [&] {
        DispatchRun dispatch(exchange, c, step);
        if (odd) dispatch.options().format->kind = static_cast<FormatKind>(number + 10);
        dispatch.call();
      });
      const auto require_combine_refused = [&](const std::function<void(CombineRun&)>& change) {
        require_refused(named, [&] {
          CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
          if (odd) change(combine);
          combine.call();
        });
      };
      require_combine_refused([&](CombineRun& combine) { combine.outputs().type = type; });
      require_combine_refused([&](CombineRun& combine) { combine.result().type = type; });
      require_combine_refused(
          [&](CombineRun& combine) { combine.options().reduction = static_cast<Reduction>(number); });
    }
    dispatch_and_combine(exchange, c, step, expert_outputs);
  });
}

TEST_P(Contract, CountsWhoseSumOverflowsAreRefused) {
  const TestCase c = three_ranks(small_case(2));
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const std::int32_t max_count = std::numeric_limits<std::int32_t>::max() / c.ranks;
    for (const std::int32_t wrong : {max_count + 1, std::numeric_limits<std::int32_t>::max(), -1,
                                     std::numeric_limits<std::int32_t>::min()}) {
      require_refused(str("a count of ", wrong, " on rank ", kWrongRank),
                      [&] { exchange.metadata(rank.index() == kWrongRank ? wrong : 7); });
      const StepMetadata all = *exchange.metadata(max_count);
      require_equal(all.sum, c.ranks * max_count, "sum");
      require_equal(all.prefix, rank.index() * max_count, "prefix");
      require_equal(all.maximum, max_count, "maximum");
    }
  });
}

TEST_P(Contract, BackwardRefusesOtherOutputTypesAndStrides) {
  const TestCase c = three_ranks(small_case(3));
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    const std::int64_t dense = c.config.hidden * bytes_of(c.config.combine_type);
    GuardedBuffer rows(2 * dense * plan.total()), d_weights(std::int64_t{plan.tokens()} * c.config.top_k * 4);
    const Outputs right{rows.data(), c.config.combine_type};
    const bool odd = rank.index() == kWrongRank;
    const auto backward = [&](const Outputs& wrong, bool apply_weights = false,
                              const void* dot_rows = nullptr) {
      DispatchRun dispatch(exchange, c, step);
      dispatch.options().apply_weights = odd && apply_weights;
      dispatch.options().dot_rows = odd ? dot_rows : nullptr;
      exchange.combine_backward(dispatch.tokens(), plan, dispatch.weights(), odd ? wrong : right,
                                d_weights.as<float>(), dispatch.options());
    };
    if (GetParam().language == nullptr) {  // C and Python have no such arguments
      require_refused("combine_backward: apply_weights on rank 1", [&] { backward(right, true); });
      require_refused("combine_backward: dot_rows on rank 1", [&] { backward(right, false, rows.data()); });
    }
    require_refused("rank 1 gives fp32", [&] { backward({rows.data(), DType::fp32}); });
    require_refused(str("stride = ", 2 * dense),
                    [&] { backward({rows.data(), c.config.combine_type, 2 * dense}); });
    backward({rows.data(), c.config.combine_type, dense});
    dispatch_and_combine(exchange, c, step, expert_outputs);
  });
}

// Result::rows, which only hosts that know N can compare with it. Python's arrays have a shape.
TEST_P(Contract, ResultsWithTooFewRowsAreRefused) {
  TestCase c = three_ranks(small_case(5));
  c.weights_from = WeightsFrom::none;
  if (GetParam().language != nullptr && GetParam().language != &kC) return;
  for (const Reduction reduction : {Reduction::exact, Reduction::unreduced}) {
    c.reduction = c.config.reduction = reduction;
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      const Plan plan = dispatch_and_combine(exchange, c, step, outputs);
      const std::int64_t rows =
          step.positions.tokens(rank.index()) * (reduction == Reduction::unreduced ? c.config.top_k : 1);
      const bool odd = rank.index() == kWrongRank;
      const auto with_rows = [&](std::int64_t given) {
        CombineRun combine(exchange, c, step, outputs, plan, nullptr);
        combine.result().rows = odd ? given : rows;
        combine.call();
      };
      require_refused("result.rows = -1 on rank 1, must be 0 or more", [&] { with_rows(-1); });
      if (!GetParam().on_device()) {
        require_refused(odd ? str("result.rows = ", rows - 1, " on rank 1, whose result has ", rows, " row")
                            : "on rank 1, whose result has",
                        [&] { with_rows(rows - 1); });
      }
      with_rows(rows);
      with_rows(rows + 1);
      dispatch_and_combine(exchange, c, step, outputs);
    });
  }
}

// Experts that write their outputs over the rows that they received: combine_backward reads the outputs while
// its dispatch writes to that memory.
TEST_P(Contract, BackwardRefusesOutputsInTheReceiveBuffers) {
  const TestCase c = three_ranks(small_case(3));
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    const std::int64_t row = c.config.hidden * bytes_of(c.config.combine_type);
    GuardedBuffer outputs(row * plan.total()), d_weights(std::int64_t{plan.tokens()} * c.config.top_k * 4),
        elsewhere(row * exchange.capacity());
    const auto backward = [&](const void* rows, void* received) {
      DispatchRun dispatch(exchange, c, step);
      DispatchOptions options = dispatch.options();
      options.memory.parts[0] = received;
      return exchange.combine_backward(dispatch.tokens(), plan, dispatch.weights(),
                                       {rows, c.config.combine_type}, d_weights.as<float>(), options);
    };
    const void* const own = backward(outputs.data(), nullptr).data;
    require_refused("which it reads, on rank 1: copy it out of the lane's memory",
                    [&] { backward(rank.index() == kWrongRank ? own : outputs.data(), nullptr); });
    require_refused("memory.parts[0]", [&] {
      // The host does not know how many rows a plan on the device has.
      const std::byte* const inside = elsewhere.data() + (GetParam().on_device() ? 0 : row);
      backward(rank.index() == kWrongRank ? inside : outputs.data(), elsewhere.data());
    });
    backward(own, elsewhere.data());
  });
}

// A row of 4 values has 16 bytes in fp32, the combine type, and 8 in bf16.
TEST_P(Contract, DenseRowsOfOtherThanSixteenBytesAreRefused) {
  TestCase c = three_ranks(small_case(5));
  c.config.hidden = 4;
  c.config.format = Format::fp32();
  c.config.combine_type = DType::fp32;
  c.type = c.outputs = c.result = DType::fp32;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    const auto require_combine_refused = [&](const char* name,
                                             const std::function<void(CombineRun&)>& change) {
      require_refused(str(name, ": a row of 8 bytes"), [&] {
        CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
        if (rank.index() == kWrongRank) change(combine);
        combine.call();
      });
    };
    require_combine_refused("outputs", [](CombineRun& combine) {
      combine.outputs().type = DType::bf16;
      combine.outputs().stride = 0;
    });
    require_combine_refused("result", [](CombineRun& combine) {
      combine.result().type = DType::bf16;
      combine.result().stride = 0;
    });
    dispatch_and_combine(exchange, c, step, expert_outputs);
  });
}

// One rank refuses a call after another rank has already recorded a diagnostic of it: the next call must not
// report it.
TEST_P(Contract, DiagnosticsOfARefusedCallAreDiscarded) {
  TestCase good = three_ranks(small_case(4));
  good.config.check_calls = true;
  good.weights_from = WeightsFrom::none;
  TestCase bad = good;
  bad.bad_ids = 0.5;
  const StepInputs step = make_inputs(good), bad_step = make_inputs(bad);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(good, step);
  ASSERT_GT(bad_step.positions.bad_ids[0].count, 0);
  run(good.ranks, describe(bad), [&](Rank rank) {
    SyncExchange exchange(rank, good.config);
    const bool odd = rank.index() == kWrongRank;
    const Plan plan = dispatch_and_combine(exchange, good, step, expert_outputs);
    require_refused("max_tokens", [&] {
      DispatchRun dispatch(exchange, bad, bad_step);
      if (odd) dispatch.tokens().count = good.config.max_tokens + 1;
      dispatch.call();
    });
    dispatch_and_combine(exchange, good, step, expert_outputs);  // throws if a diagnostic is left

    const Plan damaged = plan.copy();
    const PlanHeader& header = *static_cast<const PlanHeader*>(damaged.storage());
    const PlanView view = view_plan(damaged.storage(), header.shape);
    std::fill_n(view.received_token, header.shape.ranks * header.shape.max_tokens, -2);
    require_refused("reduction", [&] {
      CombineRun combine(exchange, good, step, expert_outputs, odd ? plan : damaged, nullptr);
      if (odd) combine.options().reduction = static_cast<Reduction>(9);
      combine.call();
    });
    dispatch_and_combine(exchange, good, step, expert_outputs);
  });
}

// A rank without tokens, and a rank without rows, may pass null for the memory they do not need.
TEST_P(Contract, EmptyInputsMayBeNull) {
  struct Combination {
    Reduction reduction;
    WeightsFrom weights_from;
  };
  for (const auto& [reduction, weights_from] : {Combination{Reduction::partial, WeightsFrom::row_weights},
                                                {Reduction::partial, WeightsFrom::topk_weights},
                                                {Reduction::exact, WeightsFrom::row_weights},
                                                {Reduction::exact, WeightsFrom::topk_weights},
                                                {Reduction::unreduced, WeightsFrom::none}}) {
    TestCase c = three_ranks(small_case(5));
    c.tokens = {5, 0, 3};
    c.full = false;
    c.config.placement =
        Placement::table({{0, 0}, {1, 0}, {0, 1}, {1, 1}, {0, 2}, {1, 2}, {0, 3}, {1, 3}}, 3);
    c.reduction = c.config.reduction = reduction;
    c.weights_from = weights_from;
    c.row_values = true;
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&, by_slot = weights_from == WeightsFrom::topk_weights](Rank rank) {
      SyncExchange exchange(rank, c.config);
      const bool no_tokens = rank.index() == 1, no_rows = rank.index() == 2;
      DispatchRun dispatch(exchange, c, step);
      const DispatchResult rows =
          no_tokens ? exchange.dispatch({}, Ids(), nullptr, dispatch.options()) : dispatch.call();
      CombineRun combine(exchange, c, step, expert_outputs, rows.plan, rows.weight);
      if (no_tokens) {
        combine.result().data = combine.options().route_values = nullptr;
        combine.options().topk_weights = nullptr;
        combine.options().topk_weighted = by_slot;
      }
      if (no_rows) {
        combine.outputs().data = nullptr;
        combine.options().row_weights = combine.options().row_values = nullptr;
      }
      combine.call();
      combine.compare();
      const std::vector<float> values(static_cast<std::size_t>(c.config.max_tokens * c.config.top_k), 1);
      GuardedBuffer mine = GuardedBuffer::of(values), row_values(*rows.total * 4);
      exchange.route_values(no_tokens ? nullptr : mine.as<float>(), rows.plan,
                            no_rows ? nullptr : row_values.as<float>());
      row_values.require_guards("row values");
      exchange.return_values(no_rows ? nullptr : row_values.as<float>(), rows.plan,
                             no_tokens ? nullptr : mine.as<float>());
      mine.require_guards("route values");
      exchange.check();
    });
  }
}

// The values of rows alone return by a call of their own: a combine without outputs and result is refused,
// and so are null values, on all ranks.
TEST_P(Contract, ValuesAloneReturnByTheirOwnCall) {
  TestCase c = three_ranks(small_case(4));
  c.full = true;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    GuardedBuffer rows(plan.total() * 4, std::byte{0}),
        routes(std::int64_t{plan.tokens()} * c.config.top_k * 4);
    const bool wrong = rank.index() == kWrongRank;
    for (const bool everywhere : {false, true}) {
      require_refused("return_values()", [&] {
        CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
        if (wrong || everywhere) combine.outputs().data = nullptr;
        if (wrong || everywhere) combine.result().data = nullptr;
        if (everywhere)
          combine.options() = {.row_values = rows.as<float>(), .route_values = routes.as<float>()};
        combine.options().row_weights = combine.options().topk_weights = nullptr;
        combine.options().topk_weighted = false;
        combine.call();
      });
    }
    require_refused("return_values", [&] {
      exchange.return_values(wrong ? nullptr : rows.as<float>(), plan, routes.as<float>());
    });
    require_refused("return_values", [&] {
      exchange.return_values(rows.as<float>(), plan, wrong ? nullptr : routes.as<float>());
    });
    // A rank that combines while the others return values.
    require_refused("return_values", [&] {
      CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
      if (wrong) return combine.call();
      exchange.return_values(rows.as<float>(), plan, routes.as<float>());
    });
    check_route_values(exchange, c, step, plan);
  });
}

TEST_P(Contract, PartialSumsNeedTopkWeightsOnAllRanks) {
  TestCase c = three_ranks(small_case(6));
  c.tokens = {5, 0, 3};
  c.full = false;
  c.weights_from = WeightsFrom::topk_weights;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    require_refused("topk_weights given", [&] {
      CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
      if (rank.index() == 1) combine.options().topk_weights = nullptr;
      if (rank.index() == 1) combine.options().topk_weighted = false;
      combine.call();
    });
    require_refused("topk_weights", [&] {
      CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
      if (rank.index() == 0) combine.options().topk_weights = nullptr;
      combine.options().topk_weighted = true;
      combine.call();
    });
    dispatch_and_combine(exchange, c, step, expert_outputs);
  });
}

}  // namespace
}  // namespace ferry::contract
