// Reuse of plans, and refusal of plans of another exchange.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::contract {
namespace {

TEST_P(Contract, OnePlanServesManyCalls) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      TestCase c = small_case(ranks);
      c.ranks = ranks;
      c.config.top_k = 3;
      c.config.layout = layout;
      c.config.format = Format::fp32();
      c.type = DType::fp32;
      if (layout == Layout::rank_major) c.weights_from = WeightsFrom::none;
      TestCase forward = c;  // dispatches fp8 rows; the backward case, bf16
      forward.config.format = Format::fp8_e4m3();
      forward.type = DType::bf16;
      TestCase backward = forward;
      backward.config.format = Format::bf16();
      const StepInputs routed = make_inputs(forward);
      const StepInputs replayed = with_new_values(backward, routed, 5), other = make_inputs(forward, 6);
      const oracle::ExpertOutputs all_expert_outputs[] = {
          make_expert_outputs(c, routed), make_expert_outputs(c, replayed), make_expert_outputs(c, other)};
      run(ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        const Plan plan = dispatch_and_combine(exchange, forward, routed, all_expert_outputs[0]);
        dispatch_and_combine(exchange, forward, other,
                             all_expert_outputs[2]);  // overwrites the plan in the lane's memory
        for (int repeat = 0; repeat < 3; ++repeat) {
          DispatchRun replay(exchange, backward, replayed);
          replay.run_with_plan(plan);
          CombineRun(exchange, backward, replayed, all_expert_outputs[1], plan, replay.received().weight)
              .run();
        }
      });
    }
  }
}

TEST_P(Contract, PlansOfAnotherExchangeAreRefused) {
  TestCase c = small_case(1), other = small_case(2);
  other.config.experts = c.config.experts + 1;
  const StepInputs step = make_inputs(c), other_step = make_inputs(other);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step),
                              other_outputs = make_expert_outputs(other, other_step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config), second(rank, other.config);
    const Plan own = dispatch_and_combine(exchange, c, step, expert_outputs),
               foreign = dispatch_and_combine(second, other, other_step, other_outputs);
    const Plan damaged = own.copy();
    static_cast<PlanHeader*>(damaged.storage())->total += 1000;
    for (const Plan& plan : {foreign, damaged, Plan()}) {
      CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
      require(!usage_error([&] { combine.call(); }).empty(),
              "a plan of another exchange, a damaged or an empty plan was accepted");
    }
    dispatch_and_combine(exchange, c, step, expert_outputs);
  });
}

// Device backends cannot tell: there the handle stands for the later plan.
TEST_P(Contract, PlansThatALaterDispatchHasOverwrittenAreRefused) {
  if (GetParam().on_device()) GTEST_SKIP() << "the host cannot read its plans";
  TestCase c = small_case(4);
  c.ranks = 3;
  c.weights_from = WeightsFrom::none;
  const StepInputs step = make_inputs(c), later = make_inputs(c, 9);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step),
                              later_outputs = make_expert_outputs(c, later);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun first(exchange, c, step), second(exchange, c, later);
    for (DispatchRun* dispatch : {&first, &second}) dispatch->options().memory.plan = nullptr;  // the lane's
    first.run();
    const Plan plan = first.received().plan, copy = plan.copy();
    second.run();
    const Plan stale = rank.index() == 1 ? plan : second.received().plan;
    CombineRun combine(exchange, c, later, later_outputs, stale, nullptr);
    require_refused("plan: it is of call 1, and call 2 has overwritten", [&] { combine.call(); });
    if (rank.index() == 1)
      require(!usage_error([&] { static_cast<void>(stale.total()); }).empty(), "total()");
    CombineRun(exchange, c, step, expert_outputs, copy, nullptr).run();
  });
}

}  // namespace
}  // namespace ferry::contract
