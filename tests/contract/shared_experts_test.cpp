// Shared experts: groups of a rank's own tokens, which come first, never travel, and are added last.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::contract {
namespace {

const std::vector<int> kTokens = {5, 0, 3, 7};

// Four ranks with another number of tokens each.
TestCase shared_case(TestCase c, int shared_experts) {
  c.ranks = 4;
  c.tokens = kTokens;
  c.config.experts = 8;
  c.config.top_k = 3;
  c.config.max_tokens = 8;
  c.config.hidden = 160;
  c.config.alignment = 4;
  c.config.shared_experts = shared_experts;
  c.masked_tokens = 0.2;
  return c;
}

TEST_P(Contract, SharedExpertsInEveryFormatAndReduction) {
  for (const int shared : {1, 2}) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
      for (const Format& format :
           {Format::bf16(), Format::fp8_e4m3(), Format::fp32(), Format::mxfp8(), Format::mxfp4(),
            Format::nvfp4({.per_token = true}), Format::raw({48, 16})}) {
        TestCase c = shared_case(small_case(shared), shared);
        c.config.layout = layout;
        c.config.format = format;
        c.config.zero_padding = shared == 2;
        c.type = natural_type(format);
        add(c);  // partial
        c.split_phases = true;
        c.caller_memory = false;
        c.outputs = DType::fp32;
        c.row_values = true;
        c.any_bits = true;
        add(c);
        c.reduction = c.config.reduction = Reduction::exact;
        c.result = DType::fp32;
        add(c);
        c.split_phases = false;
        c.weights_from = WeightsFrom::topk_weights;
        c.shared_outputs = shared == 2;
        c.type = format.quantises() ? DType::fp16 : c.type;
        add(c);
        c.reduction = c.config.reduction = Reduction::unreduced;
        c.weights_from = WeightsFrom::none;
        c.shared_outputs = true;
        add(c);
        c.split_phases = true;
        add(c);
      }
    }
  }
  run_added();
}

TEST_P(Contract, SharedRowsPastTheCapacityAreDropped) {
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded}) {
    for (const bool shared_outputs : {false, true}) {
      TestCase c = shared_case(small_case(3), 2);
      c.config.layout = layout;
      c.config.capacity = layout == Layout::expert_major ? 12 : 4;  // fewer than S * align(7), and than 7
      c.shared_outputs = shared_outputs;
      add(c);
      c.split_phases = true;
      c.any_bits = true;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, SharedExpertsByPlanAndOnNodes) {
  TestCase c = shared_case(small_case(4), 2);
  c.tokens.clear();
  run_sequences(GetParam(), {c});
  c.split_phases = true;
  c.nodes = {0, 1, 0, 0};
  c.config.reduction_level = ReductionLevel::node;
  c.result = DType::fp32;
  run_sequences(GetParam(), {c});
}

// A caller may start the shared experts while the routed rows are on their way.
TEST_P(Contract, SharedRowsAreThereAfterTheSendPhase) {
  const TestCase c = shared_case(small_case(9), 2);
  const StepInputs step = make_inputs(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    dispatch.send();
    const std::vector<std::byte>& tokens = step.inputs.ranks[rank.index()].parts[0];
    const std::int64_t stride = (kTokens[rank.index()] + 3) / 4 * 4 * c.config.hidden * 2;
    for (int s = 0; s < 2; ++s) {
      const std::byte* rows = dispatch.part_memory()[0].data() + s * stride;
      require(std::equal(tokens.begin(), tokens.end(), rows), "rows of shared expert ", s, " are not there");
    }
    dispatch.receive();
    dispatch.compare();
  });
}

TEST_P(Contract, SharedRowsComeFirstAndDoNotTravel) {
  for (const Format& format : {Format::bf16(), Format::fp8_e4m3()}) {
    std::vector<PreparedStep> steps;
    for (const int shared : {0, 1, 2}) {
      TestCase c = shared_case(small_case(5), shared);
      c.config.format = format;
      c.shared_outputs = shared > 0;
      steps.push_back(prepare(c));
    }
    run(4, describe(steps[2].c), [&](Rank rank) {
      WireCounts without;
      for (const auto& [c, step, outputs] : steps) {
        SyncExchange exchange(rank, c.config);
        const Plan plan = dispatch_and_combine(exchange, c, step, outputs);
        const WireCounts wire = exchange.wire_counts();
        if (c.config.shared_experts == 0) without = wire;
        require_equal(wire.dispatch_bytes, without.dispatch_bytes, "dispatch bytes");
        require_equal(wire.combine_bytes, without.combine_bytes, "combine bytes");
        DispatchRun dispatch(exchange, c, step);
        require_equal(exchange.dispatch_counts(dispatch.ids(), kTokens[rank.index()]).total,
                      std::int64_t{plan.total()}, "total of dispatch_counts");
      }
    });
  }
}

// dy arrives at the shared rows times 1; their dots are 0, and no weight has a gradient from them.
void check_backward(const Setup& setup, const TestCase& c) {
  const StepInputs forward = make_inputs(c), gradient = with_new_values(c, forward, 1);
  TestCase backward_case = c;
  backward_case.apply_weights = backward_case.dots = true;
  StepInputs weighted = gradient;
  weighted.inputs.apply_weights = true;
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, forward);
  oracle::ExpertOutputs dots;
  dots.ranks.resize(c.ranks);
  for (int rank = 0; rank < c.ranks; ++rank) {
    const std::vector<std::byte> v = make_dot_rows(backward_case, weighted, rank);
    dots.ranks[rank].row_values =
        oracle::row_dots(weighted.inputs, weighted.positions, rank, v.data(), c.config.combine_type);
  }
  run_ranks(setup, c.ranks, describe(backward_case), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, forward, expert_outputs);
    const std::vector<float> expected = oracle::returned_row_values(weighted.positions, dots, rank.index());
    GuardedBuffer d_weights(static_cast<std::int64_t>(expected.size()) * 4);
    DispatchRun backward(exchange, backward_case, weighted);
    backward.run_backward(plan, d_weights.as<float>());
    d_weights.require_contents(bytes_of_values(expected), sizeof(float), "d_weights");
  });
}

TEST_P(Contract, SharedExpertsAndReplicatedInputBackward) {
  TestCase c = shared_case(small_case(6), 2);
  check_backward(GetParam(), c);
  c.config.input = Input::replicated;
  c.config.shared_split = 3;
  c.tokens.assign(4, 7);
  check_backward(GetParam(), c);
}

TEST_P(Contract, SharedExpertsRefuseBadCalls) {
  TestCase c = shared_case(small_case(7), 1);
  c.tokens = {5, 2, 3, 7};
  c.config.format = Format::fp32();
  c.type = DType::fp32;
  c.config.reduction = Reduction::unreduced;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const bool odd = rank.index() == 1;
    const Plan plan = dispatch_and_combine(exchange, c, step, outputs);
    require_refused("pass shared_outputs for the 1 shared experts of rank 1", [&] {
      CombineRun combine(exchange, c, step, outputs, plan, nullptr);
      combine.options().reduction = odd ? Reduction::unreduced : Reduction::partial;
      combine.options().row_weights = nullptr;
      combine.call();
    });
    require_refused("memory.rows = 3 on rank 1, must be 4 or more", [&] {
      DispatchRun dispatch(exchange, c, step);
      if (odd) dispatch.options().memory.rows = 3;
      dispatch.call();
    });
    dispatch_and_combine(exchange, c, step, outputs);
  });
}

// The id of a shared expert is not a routed expert's.
TEST_P(Contract, IdsOfSharedExpertsAreBadIds) {
  TestCase c = shared_case(small_case(8), 2);
  std::vector<std::vector<std::int64_t>> ids(4);
  ids[2] = {0, c.config.experts, 5, -1, 1, 2};
  run_case(c, inputs_from_ids(c, ids));
}

}  // namespace
}  // namespace ferry::contract
