// The layout expert_indexed: each token is stored once, and positions index the rows.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/indexed_rows.hpp"

namespace ferry::contract {
namespace {

constexpr const char* kNoKernels = "device memory has no expert_indexed";

TestCase indexed_case(TestCase c, int ranks) {
  c.ranks = ranks;
  c.config.layout = Layout::expert_indexed;
  c.config.experts = 2 * ranks + 1;
  c.config.top_k = 3;
  c.config.max_tokens = 12;
  c.masked = 0.1;
  c.masked_tokens = 0.2;
  return c;
}

TEST_P(Contract, IndexedRowsInEveryFormatAndForm) {
  if (GetParam().on_device()) GTEST_SKIP() << kNoKernels;
  const std::vector<Format> formats = {Format::bf16(),
                                       Format::fp8_e4m3(),
                                       Format::fp8_e4m3({.column_major = true}),
                                       Format::mxfp8({.column_major = true}),
                                       Format::nvfp4({.per_token = true}),
                                       Format::raw({48, 16})};
  for (const int ranks : kGroupSizes) {
    for (const Format& format : formats) {
      TestCase c = indexed_case(small_case(ranks), ranks);
      c.config.format = format;
      c.config.alignment = ranks == 3 ? 1 : 4;
      run_sequences(GetParam(), {c});  // also by plan, route values, the messages and load counts
      c.caller_memory = false;
      c.split_phases = c.row_values = true;
      add(c);
      c.config.shared_experts = 2;
      add(c);
      c.split_phases = false;
      c.reduction = c.config.reduction = Reduction::exact;
      c.weights_from = WeightsFrom::topk_weights;
      add(c);
    }
  }
  run_added();
}

// A token keeps its row when its routes are dropped.
TEST_P(Contract, IndexedRowsAreNeverDropped) {
  if (GetParam().on_device()) GTEST_SKIP() << kNoKernels;
  TestCase c = indexed_case(small_case(1), 4);
  c.full = true;
  c.config.alignment = 4;
  c.config.capacity = 12;
  const StepInputs step = make_inputs(c);
  for (int rank = 0; rank < c.ranks; ++rank) {
    const oracle::IndexedRows rows = oracle::indexed_rows(step.inputs, step.positions, rank);
    EXPECT_GT(rows.source.size(), 12u);
  }
  run_case(c, step);
  c.config.shared_experts = 1;
  c.split_phases = true;
  run_case(c, make_inputs(c));
}

// The backward pass: positions are the rows of expert_major, so a plan serves both.
TEST_P(Contract, PlansOfIndexedRowsServeExpertMajor) {
  if (GetParam().on_device()) GTEST_SKIP() << kNoKernels;
  TestCase c = indexed_case(small_case(2), 3);
  c.config.alignment = 8;
  TestCase major = c;
  major.config.layout = Layout::expert_major;
  major.apply_weights = major.dots = true;
  const StepInputs step = make_inputs(c), gradients = with_new_values(major, make_inputs(major), 1);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config), backward(rank, major.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, outputs);
    const auto weights = gradients.inputs.ranks[rank.index()].weights.size();
    GuardedBuffer d_weights(static_cast<std::int64_t>(weights * sizeof(float)));
    DispatchRun(backward, major, gradients).run_backward(plan, d_weights.as<float>());  // compares the rows
    d_weights.require_guards("d_weights");
  });
}

TEST_P(Contract, IndexedRowsAreRefusedByNameWhereTheyAreNotAvailable) {
  const auto refused = [&](const std::string& words, const std::function<void(TestCase&)>& change) {
    TestCase c = indexed_case(small_case(3), 2);
    c.config.layout = Layout::expert_indexed;
    change(c);
    run(c.ranks, words,
        [&](Rank rank) { require_error(words, [&] { SyncExchange exchange(rank, exchange_config(c)); }); });
  };
  if (GetParam().on_device()) {
    return refused("layout expert_indexed on device memory", [](TestCase&) {});
  }
  refused("layout expert_indexed with zero_padding", [](TestCase& c) { c.config.zero_padding = true; });
  refused("layout expert_indexed with replicated input",
          [](TestCase& c) { c.config.input = Input::replicated; });
  if (GetParam().has_gathered_input()) {
    refused("layout expert_indexed with transfer = gather",
            [](TestCase& c) { c.config.transfer = Transfer::gather; });
  }
  refused("expert_indexed has no tiles",
          [](TestCase& c) { c.config.format = Format::mxfp8({.tiles = true}); });
}

TEST_P(Contract, CallsOnIndexedRowsAreRefusedByName) {
  if (GetParam().on_device()) GTEST_SKIP() << kNoKernels;
  TestCase c = indexed_case(small_case(4), 2);
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  const std::vector<float> scales(static_cast<std::size_t>(c.config.experts), 1.0f);
  const std::vector<std::byte> dot_rows(1 << 20);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const auto refused = [&](const std::string& words, const std::function<void(DispatchOptions&)>& change) {
      DispatchRun dispatch(exchange, c, step);
      change(dispatch.options());
      require_refused(words, [&] { dispatch.call(); });
    };
    refused("apply_weights and dot_rows need an expert layout, and the exchange's is expert_indexed",
            [](DispatchOptions& options) { options.apply_weights = true; });
    refused("apply_weights and dot_rows need an expert layout",
            [&](DispatchOptions& options) { options.dot_rows = dot_rows.data(); });
    refused("memory.rows is not supported with expert_padded, expert_indexed",
            [](DispatchOptions& options) { options.memory.rows = 8; });
    refused("input_scales need an expert layout, and the exchange's is expert_indexed",
            [&](DispatchOptions& options) {
              options.format = Format::mxfp8();
              options.input_scales = scales;
            });
    refused("expert_indexed has no tiles",
            [](DispatchOptions& options) { options.format = Format::mxfp8({.tiles = true}); });
    dispatch_and_combine(exchange, c, step, outputs);
  });
}

}  // namespace
}  // namespace ferry::contract
