// Ranks whose configurations, options or plans differ: the error names the difference.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

TEST_P(Contract, ErrorsNameDifferingConfigFields) {
  const TestCase c = small_case(1);
  struct Change {
    const char* name;
    std::function<void(Config&)> apply;
  };
  const Change changes[] = {{"experts", [](Config& g) { g.experts += 1; }},
                            {"top_k", [](Config& g) { g.top_k += 1; }},
                            {"hidden", [](Config& g) { g.hidden += 16; }},
                            {"max_tokens", [](Config& g) { g.max_tokens += 1; }},
                            {"layout", [](Config& g) { g.layout = Layout::rank_major; }},
                            {"alignment", [](Config& g) { g.alignment = 2; }},
                            {"capacity", [](Config& g) { g.capacity = 64; }},
                            {"repeats", [](Config& g) { g.repeats = true; }},
                            {"zero_padding", [](Config& g) { g.zero_padding = true; }},
                            {"format", [](Config& g) { g.format = Format::fp32(); }},
                            {"combine_type", [](Config& g) { g.combine_type = DType::fp16; }},
                            {"reduction", [](Config& g) { g.reduction = Reduction::exact; }},
                            {"lanes", [](Config& g) { g.lanes = 3; }},
                            {"deadline", [](Config& g) { g.deadline = 12; }},
                            {"placement", [](Config& g) {
                               std::vector<ExpertLocation> positions =
                                   Placement::blocks(g.experts, 2).locations();
                               std::swap(positions[0], positions[7]);
                               g.placement = Placement::table(positions, 2);
                             }}};
  for (const Change& change : changes) {
    run(c.ranks, change.name, [&](Rank rank) {
      Config config = c.config;
      if (rank.index() == 1) change.apply(config);
      require_refused(change.name, [&] { SyncExchange exchange(rank, config); });
    });
  }
}

TEST_P(Contract, ErrorsNameDifferingOptions) {
  TestCase c = small_case(1);
  c.ranks = 3;
  c.full = true;
  c.config.reduction = Reduction::exact;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    const bool odd = rank.index() == 1;
    const auto require_named = [&](const char* name, const std::function<void()>& call) {
      require_refused(name, call);
      dispatch_and_combine(exchange, c, step, expert_outputs);  // the exchange is still usable
    };
    require_named("format is ", [&] {
      DispatchRun dispatch(exchange, c, step);
      if (odd) dispatch.options().format = Format::fp8_e4m3();
      dispatch.call();
    });
    require_named("fp8 on rank 1", [&] {
      DispatchRun dispatch(exchange, c, step);
      if (odd) dispatch.options().format = Format::fp8_e4m3();
      dispatch.call();
    });
    require_named("true on rank 1", [&] { DispatchRun(exchange, c, step).call(odd ? plan : Plan()); });
    require_named("weights given (on every rank or none, also without tokens) is ", [&] {
      DispatchRun dispatch(exchange, c, step);
      exchange.dispatch(dispatch.tokens(), dispatch.ids(), odd ? nullptr : dispatch.weights(),
                        dispatch.options());
    });
    require_named("apply_weights is ", [&] {
      DispatchRun dispatch(exchange, c, step);
      dispatch.options().apply_weights = odd;
      dispatch.call();
    });
    require_named("row_weights", [&] {
      CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
      if (odd) combine.options().row_weights = nullptr;
      combine.call();
    });
    require_named("row_values", [&] {
      CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
      GuardedBuffer rows(plan.total() * 4), routes(std::int64_t{plan.tokens()} * c.config.top_k * 4);
      if (odd) combine.options().row_values = rows.as<float>();
      if (odd) combine.options().route_values = routes.as<float>();
      combine.call();
    });
    // Partial and exact rows have different positions in the staging buffer, so ranks that differ may write
    // the same bytes before they detect it. No rank reads these bytes, but the thread sanitizer reports the
    // race.
#ifdef __SANITIZE_THREAD__
    const Reduction usual = Reduction::unreduced;
#else
    const Reduction usual = Reduction::partial;
#endif
    require_named("exact on rank 1", [&] {
      CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
      combine.options().row_weights = nullptr;
      combine.options().reduction = odd ? Reduction::exact : usual;
      combine.call();
    });
  });
}

// Two valid plans of one exchange; one rank uses the wrong one.
TEST_P(Contract, DifferentPlansAreRefused) {
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
    TestCase c = small_case(2);
    c.ranks = 3;
    c.full = true;
    c.config.layout = layout;
    c.weights_from = WeightsFrom::none;
    const StepInputs first = make_inputs(c, 0), second = make_inputs(c, 1);
    const oracle::ExpertOutputs all_expert_outputs[] = {make_expert_outputs(c, first),
                                                        make_expert_outputs(c, second)};
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      const Plan kept = dispatch_and_combine(exchange, c, first, all_expert_outputs[0]),
                 other = dispatch_and_combine(exchange, c, second, all_expert_outputs[1]);
      const bool odd = rank.index() == 1;
      const Plan& mine = odd ? other : kept;
      const auto require_refusal = [&](const std::function<void()>& call) {
        require_refused("call that made the plan", call);
        DispatchRun(exchange, c, first).run_with_plan(kept);  // the exchange is still usable
      };
      require_refusal([&] { DispatchRun(exchange, c, first).call(mine); });
#ifndef __SANITIZE_THREAD__  // as above: sums by two plans may write the same bytes
      require_refusal([&] {
        const StepInputs& step = odd ? second : first;
        CombineRun(exchange, c, step, all_expert_outputs[odd], mine, nullptr).call();
      });
#endif
      if (layout == Layout::rank_major) return;
      require_refusal([&] {
        GuardedBuffer values(std::int64_t{mine.tokens()} * c.config.top_k * 4), rows(mine.total() * 4);
        exchange.route_values(values.as<float>(), mine, rows.as<float>());
      });
      require_refusal([&] {
        GuardedBuffer values(std::int64_t{mine.tokens()} * c.config.top_k * 4), rows(mine.total() * 4);
        exchange.return_values(rows.as<float>(), mine, values.as<float>());
      });
    });
  }
}

}  // namespace
}  // namespace ferry::contract
