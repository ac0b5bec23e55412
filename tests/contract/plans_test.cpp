// Plans as values: kept ones, those of others.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::contract {
namespace {

TEST_P(Contract, APlanServesManyCalls) {
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      Case c = small_case(ranks);
      c.ranks = ranks;
      c.config.top_k = 3;
      c.config.layout = layout;
      c.config.format = Format::fp32();
      c.type = DType::fp32;
      if (layout == Layout::rank_major) c.weights_from = WeightsFrom::nowhere;
      Case forward = c;  // fp8 there, bf16 back
      forward.config.format = Format::fp8_e4m3();
      forward.type = DType::bf16;
      Case backward = forward;
      backward.config.format = Format::bf16();
      const Step routed = make_step(forward);
      const Step again = with_values(backward, routed, 5), other = make_step(forward, 6);
      const oracle::Outcome outcomes[] = {make_outcome(c, routed), make_outcome(c, again),
                                          make_outcome(c, other)};
      run(ranks, describe(c), [&](Rank rank) {
        Exchange exchange(rank, c.config);
        const Plan plan = play_step(exchange, forward, routed, outcomes[0]);
        play_step(exchange, forward, other, outcomes[2]);  // the lane's own plan is another one now
        for (int repeat = 0; repeat < 3; ++repeat) {
          DispatchRun replay(exchange, backward, again);
          replay.run_by(plan);
          CombineRun(exchange, backward, again, outcomes[1], plan, replay.received().weight).run();
        }
      });
    }
  }
}

TEST_P(Contract, PlansOfAnotherExchangeAreRefused) {
  Case c = small_case(1), other = small_case(2);
  other.config.experts = c.config.experts + 1;
  const Step step = make_step(c), other_step = make_step(other);
  const oracle::Outcome outcome = make_outcome(c, step), other_outcome = make_outcome(other, other_step);
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config), second(rank, other.config);
    const Plan own = play_step(exchange, c, step, outcome),
               foreign = play_step(second, other, other_step, other_outcome);
    const Plan damaged = own.copy();
    static_cast<PlanHeader*>(damaged.storage())->total += 1000;
    for (const Plan& plan : {foreign, damaged, Plan()}) {
      bool refused = false;
      try {
        CombineRun combine(exchange, c, step, outcome, plan, nullptr);
        combine.call();
      } catch (const UsageError&) {
        refused = true;
      }
      require(refused, "a plan that is not this exchange's went through");
    }
    play_step(exchange, c, step, outcome);
  });
}

}  // namespace
}  // namespace ferry::contract
