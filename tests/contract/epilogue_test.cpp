// The epilogue of combine (CombineOptions::epilogue): the bytes of a pass of its own over the result.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/combine.hpp"

namespace ferry::contract {
namespace {

TestCase epilogue_case(TestCase c, int ranks) {
  c.ranks = ranks;
  c.config.experts = 8;
  c.config.top_k = 5;  // more rows than the sum's first pass takes
  c.config.max_tokens = 9;
  c.config.hidden = 600;  // more than a block of columns
  if (on_device(c.config)) c.config.deadline = 4;
  c.masked = 0.3;
  c.masked_tokens = 0.2;
  return c;
}

// One dispatch and a combine with this epilogue, compared with the oracle. `in_place`: the result is the
// residual.
void check_epilogue(SyncExchange& exchange, const TestCase& c, int index, float scale, bool adds,
                    std::int64_t gap, bool in_place = false) {
  const int rank = exchange.rank().index();
  const StepInputs step = make_inputs(c, index);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  DispatchRun dispatch(exchange, c, step);
  dispatch.run();
  const std::int64_t tokens = step.positions.tokens(rank), row = c.config.hidden * bytes_of(c.result);
  Random random(c.seed + static_cast<std::uint64_t>(index + rank));
  const std::vector<std::byte> dense = random_rows(random, c.result, tokens * c.config.hidden, true);
  GuardedBuffer residual(tokens * (row + gap));
  copy_rows(dense, row, gap > 0 ? row + gap : 0, residual.data());
  CombineRun combine(exchange, c, step, outputs, dispatch.received().plan, dispatch.received().weight);
  combine.options().epilogue = {
      .residual = adds ? residual.data() : nullptr, .stride = gap > 0 ? row + gap : 0, .scale = scale};
  if (in_place) {
    copy_rows(dense, row, combine.result().stride, static_cast<std::byte*>(combine.result().data));
    combine.options().epilogue.residual = combine.result().data;
    combine.options().epilogue.stride = combine.result().stride;
  }
  if (c.split_phases) {
    combine.send();
    combine.receive();
  } else {
    combine.call();
  }
  std::vector<std::byte> image(combine.result_memory().bytes(), kPoison);
  copy_rows(
      oracle::with_epilogue(
          c.result, oracle::combined(c.config, step.positions, outputs, exchange.rank().topology(), rank),
          scale, adds ? dense.data() : nullptr),
      row, combine.result().stride, image.data());
  combine.result_memory().require_contents(image, static_cast<std::size_t>(bytes_of(c.result)), "result");
  combine.require_guards();
  residual.require_guards("residual");
  exchange.check(c.lane);
}

TEST_P(Contract, EpilogueScalesAndAddsTheResidual) {
  for (const int ranks : kGroupSizes) {
    for (const int variant : {0, 1, 2, 3, 4}) {
      TestCase c = epilogue_case(small_case(static_cast<std::uint64_t>(10 * ranks + variant)), ranks);
      if (variant == 1) c.reduction = c.config.reduction = Reduction::exact;
      if (variant == 2) c.result = DType::fp32;
      if (variant == 3) c.result = DType::fp16;
      if (variant == 4) c.config.shared_experts = 2;
      c.split_phases = variant % 2 == 1;
      c.any_bits = variant == 0;
      run(ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        check_epilogue(exchange, c, 0, 1.0f, true, 0);
        check_epilogue(exchange, c, 1, 2.5f, false, 0);
        check_epilogue(exchange, c, 2, -0.3f, true, 32);
      });
    }
  }
}

// x += scale * moe(x).
TEST_P(Contract, AResultMayBeItsResidual) {
  for (const int ranks : kGroupSizes) {
    for (const int variant : {0, 1, 2, 3, 4, 5}) {
      TestCase c = epilogue_case(small_case(static_cast<std::uint64_t>(10 * ranks + variant)), ranks);
      if (variant % 2 == 1) c.reduction = c.config.reduction = Reduction::exact;
      if (variant == 2) c.result = DType::fp32;
      if (variant == 3) c.result = DType::fp16;
      if (variant == 4) c.config.shared_experts = 2;
      if (variant == 5) c.weights_from = WeightsFrom::topk_weights;
      c.result_gap = variant % 3 == 1 ? 32 : 0;
      c.any_bits = variant == 0;
      run(ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        for (const bool split : {false, true}) {
          TestCase phases = c;
          phases.split_phases = split;
          check_epilogue(exchange, phases, 0, 1.0f, true, 0, true);
          check_epilogue(exchange, phases, 1, -0.3f, true, 0, true);
        }
      });
    }
  }
}

// More tokens than travel in packets, in rows longer than a cache holds.
TEST_P(Contract, AResultMayBeItsResidualForManyTokens) {
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    TestCase c = epilogue_case(small_case(7), 4);
    c.config.max_tokens = 300;
    c.config.hidden = 2048;
    c.config.deadline = 20;
    c.reduction = c.config.reduction = reduction;
    c.full = true;
    run(4, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      check_epilogue(exchange, c, 0, 1.0f, true, 0, true);
    });
  }
}

TEST_P(Contract, EpiloguesAreRefusedByNameWhereTheyAreNotAvailable) {
  TestCase c = epilogue_case(small_case(3), 2);
  c.config.reduction = Reduction::unreduced;
  run(2, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const StepInputs step = make_inputs(c);
    DispatchRun dispatch(exchange, c, step);
    dispatch.run();
    const bool second = rank.index() == 1;
    const std::int64_t rows = 2 * 9 * c.config.top_k, row = 2 * c.config.hidden;
    GuardedBuffer outputs(rows * row), result(rows * row), residual(9 * row + 16);
    const auto refused = [&](const std::string& words, Reduction reduction, const Epilogue& epilogue) {
      std::string text = "none";
      try {
        exchange.combine({.data = outputs.data()}, dispatch.received().plan, {.data = result.data()},
                         {.reduction = reduction, .epilogue = second ? epilogue : Epilogue{}});
        exchange.check();
      } catch (const Error& error) {
        text = error.what();
      }
      require(text.find(words) != std::string::npos, "'", text, "' does not name '", words, "'");
    };
    refused("unreduced has no epilogue, rank 1 gives one: pass none", Reduction::unreduced, {.scale = 2});
    refused("residual", Reduction::partial, {.residual = residual.data() + 4});
    refused("residual: stride = 8 bytes on rank 1", Reduction::partial,
            {.residual = residual.data(), .stride = 8});
  });
}

}  // namespace
}  // namespace ferry::contract
