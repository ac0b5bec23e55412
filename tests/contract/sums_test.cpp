// Results of combine: sums, unreduced rows, row values.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "harness/experts.hpp"
#include "harness/harness.hpp"
#include "harness/jitter.hpp"
#include "oracle/combine.hpp"
#include "oracle/numbers.hpp"
#include "repeats.hpp"

namespace ferry::contract {
namespace {

constexpr DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32};

TestCase sum_case(TestCase c, int ranks) {
  c.ranks = ranks;
  c.config.experts = 4 * ranks;
  c.config.top_k = 4;
  c.config.max_tokens = 10;
  c.config.hidden = 80;
  return c;
}

TEST_P(Contract, WeightedSums) {
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      for (const WeightsFrom from :
           {WeightsFrom::none, WeightsFrom::row_weights, WeightsFrom::topk_weights}) {
        for (const DType combine_type : kTypes) {
          TestCase c = sum_case(small_case(ranks), ranks);
          c.reduction = c.config.reduction = reduction;
          c.weights_from = from;
          c.config.combine_type = combine_type;
          c.outputs = kTypes[ranks % 3];
          c.result = combine_type == DType::bf16 ? DType::fp32 : DType::bf16;
          c.any_bits = ranks == 3;
          add(c);
        }
      }
    }
  }
  run_added();
}

// Requires |y - sum w v|, computed in double, to be within the bound that follows from the specified
// roundings.
void require_within_bound(const TestCase& c, const StepInputs& step,
                          const oracle::ExpertOutputs& expert_outputs, const Rank& rank_handle,
                          const CombineRun& combine) {
  const int rank = rank_handle.index(), hidden = c.config.hidden, top_k = c.config.top_k;
  const Topology& topology = rank_handle.topology();
  const bool partial = c.reduction == Reduction::partial, by_node = partial && topology.nodes() > 1;
  for (int token = 0; token < step.positions.tokens(rank); ++token) {
    for (int column = 0; column < hidden; ++column) {
      double sum = 0, magnitude = 0;
      std::vector<double> on_rank(c.ranks), on_node(topology.nodes());
      for (int slot = 0; slot < top_k; ++slot) {
        const oracle::RouteTarget& route = step.positions.route(rank, token, slot);
        if (route.row < 0) continue;
        const oracle::RankOutputs& there = expert_outputs.ranks[route.destination];
        const std::byte* v = there.rows.data() + (route.row * hidden + column) * bytes_of(c.outputs);
        const double term = double{there.weights[route.row]} * oracle::load(c.outputs, v);
        sum += term;
        magnitude += std::fabs(term);
        on_rank[route.destination] += term;
        on_node[topology.node_of(route.destination)] += term;
      }
      const std::byte* got = combine.result_memory().data() + (token * hidden + column) * bytes_of(c.result);
      const double y = oracle::load(c.result, got);
      double bound =
          std::fabs(y) * (c.result == DType::bf16 ? 0x1p-8 : 0x1p-24) + (top_k + 1) * 0x1p-24 * magnitude;
      for (const double p : on_rank) bound += partial ? std::fabs(p) * 0x1p-8 : 0;
      for (const double q : on_node) bound += by_node ? std::fabs(q) * 0x1p-8 : 0;
      require(std::fabs(y - sum) <= bound, "token ", token, " column ", column, ": ", y, " is not within ",
              bound, " of ", sum);
    }
  }
}

TEST_P(Contract, SumsAreWithinTheErrorBound) {
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      TestCase c = sum_case(small_case(ranks), ranks);
      c.config.top_k = 8;
      c.reduction = c.config.reduction = reduction;
      c.result = ranks % 2 ? DType::bf16 : DType::fp32;
      const StepInputs step = make_inputs(c);
      const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
      run(ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        DispatchRun dispatch(exchange, c, step);
        dispatch.run();
        CombineRun combine(exchange, c, step, expert_outputs, dispatch.received().plan,
                           dispatch.received().weight);
        combine.run();
        require_within_bound(c, step, expert_outputs, rank, combine);
      });
    }
  }
}

TEST_P(Contract, UnreducedRows) {
  for (const int ranks : kGroupSizes) {
    for (const DType combine_type : kTypes) {
      TestCase c = sum_case(small_case(ranks), ranks);
      c.reduction = c.config.reduction = Reduction::unreduced;
      c.weights_from = WeightsFrom::none;
      c.config.combine_type = c.outputs = combine_type;
      c.result = ranks % 2 ? combine_type : DType::fp32;
      c.masked = 0.2;
      c.any_bits = true;  // moved rows keep every bit
      c.row_values = true;
      c.result_gap = 32;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, PartialSendsOneRowPerTokenAndRank) {
  TestCase c = sum_case(small_case(1), 4);
  c.config.top_k = 8;
  c.config.max_tokens = 64;
  c.config.hidden = 1024;
  c.full = true;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    dispatch_and_combine(exchange, c, step, expert_outputs);
    const WireCounts wire = exchange.wire_counts();
    const std::int64_t rows =
        oracle::combine_messages(step.positions, travel_of(exchange), rank.index(), Reduction::partial).all();
    const auto expected = static_cast<double>(rows) * 2 * 1024,
               bytes = static_cast<double>(wire.combine_bytes);
    require_equal(wire.combine_messages, rows, "rows returned to source ranks");
    require(bytes > 0.97 * expected && bytes < 1.03 * expected, bytes, " bytes, expected about ", expected);
  });
}

TEST_P(Contract, SumsAreTheSameUnderJitter) {
  TestCase c = sum_case(small_case(1), 4);
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  if (!Jitter::kAvailable) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const Jitter jitter;
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    dispatch.run();
    for (int repeat = 0; repeat < test::repeats(1000); ++repeat) {
      CombineRun(exchange, c, step, expert_outputs, dispatch.received().plan, dispatch.received().weight)
          .run();
    }
  });
}

// Dispatch, elementwise experts, combine: the result for the tokens of this rank.
GuardedBuffer run_layer(SyncExchange& exchange, const TestCase& c, const StepInputs& step) {
  DispatchRun dispatch(exchange, c, step);
  dispatch.run();
  const DispatchResult& rows = dispatch.received();
  const GuardedBuffer outputs = GuardedBuffer::of(apply_experts(rows, c.config.hidden, DType::bf16));
  GuardedBuffer result(step.positions.tokens(exchange.rank().index()) * c.config.hidden * 2);
  exchange.combine({outputs.data()}, rows.plan, {result.data()}, {.row_weights = rows.weight});
  return result;
}

TEST_P(Contract, ResultsDoNotDependOnTheBatch) {
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    TestCase c = sum_case(small_case(1), 3);
    c.full = true;
    c.config.reduction = reduction;
    const StepInputs batch = make_inputs(c);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      const GuardedBuffer together = run_layer(exchange, c, batch);
      const std::int64_t row = c.config.hidden * 2;
      for (int token = 0; token < c.config.max_tokens; ++token) {
        // Only this token of rank 1.
        std::vector<std::vector<std::int64_t>> ids(c.ranks);
        const auto first = batch.inputs.ranks[1].ids.begin() + token * c.config.top_k;
        ids[1].assign(first, first + c.config.top_k);
        StepInputs alone = inputs_from_ids(c, ids);
        const auto values = batch.inputs.ranks[1].parts[0].begin() + token * row;
        alone.inputs.ranks[1].parts[0].assign(values, values + row);
        const auto weights = batch.inputs.ranks[1].weights.begin() + token * c.config.top_k;
        alone.inputs.ranks[1].weights.assign(weights, weights + c.config.top_k);
        const GuardedBuffer single = run_layer(exchange, c, alone);
        if (rank.index() != 1) continue;
        require_equal_bytes(single.span(), together.span().subspan(token * row, row), 2,
                            str("token ", token));
      }
    });
  }
}

TEST_P(Contract, StridedResultsAndOutputs) {
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact, Reduction::unreduced}) {
      TestCase c = sum_case(small_case(ranks), ranks);
      c.reduction = c.config.reduction = reduction;
      if (reduction == Reduction::unreduced) c.weights_from = WeightsFrom::none;
      c.output_gap = 16 * ranks;
      c.result_gap = 48;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, RowValuesInBothDirections) {
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact, Reduction::unreduced}) {
      TestCase c = sum_case(small_case(ranks), ranks);
      c.masked = 0.2;
      c.config.alignment = 4;
      c.reduction = c.config.reduction = reduction;
      if (reduction == Reduction::unreduced) c.weights_from = WeightsFrom::none;
      c.row_values = true;
      const StepInputs step = make_inputs(c);
      const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
      run(ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
        check_route_values(exchange, c, step, plan);
      });
    }
  }
}

TEST_P(Contract, RankMajorRowsArePartialSums) {
  for (const int ranks : kGroupSizes) {
    for (const DType combine_type : kTypes) {
      TestCase c = sum_case(small_case(ranks), ranks);
      c.config.layout = Layout::rank_major;
      c.config.combine_type = combine_type;
      c.weights_from = WeightsFrom::none;
      c.any_bits = ranks > 3;
      add(c);
      c.split_phases = true;
      add(c);
      c.split_phases = false;
      c.any_bits = true;
      c.outputs = c.result = combine_type;
      add(c);
    }
  }
  run_added();
}

// Rows, combine and result in one type, which specialised kernels handle. A sum over one row of weight 1 must
// be 0 + v, which turns -0 into 0. Some ranks have fewer than 32 tokens, some more, so that few tokens have
// rows on a given rank.
TEST_P(Contract, SumsOfOneType) {
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      for (const WeightsFrom from :
           {WeightsFrom::none, WeightsFrom::row_weights, WeightsFrom::topk_weights}) {
        for (const DType type : kTypes) {
          TestCase c = sum_case(small_case(ranks), ranks);
          c.reduction = c.config.reduction = reduction;
          c.weights_from = from;
          c.config.combine_type = c.outputs = c.result = type;
          c.config.top_k = 1 + ranks % 3;
          c.any_bits = true;
          add(c);
          c.config.max_tokens = 45;
          c.full = type != DType::fp16;
          add(c);
        }
      }
    }
  }
  run_added();
}

TEST_P(Contract, InvalidReductionsAreRefused) {
  TestCase c = sum_case(small_case(1), 2);
  c.config.layout = Layout::rank_major;
  c.weights_from = WeightsFrom::none;
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  TestCase expert_major = sum_case(small_case(2), 2);
  expert_major.reduction = expert_major.config.reduction = Reduction::unreduced;
  expert_major.weights_from = WeightsFrom::none;
  const StepInputs expert_major_step = make_inputs(expert_major);
  const oracle::ExpertOutputs expert_major_outputs = make_expert_outputs(expert_major, expert_major_step);
  const auto require_refused = [](CombineRun& combine, const char* what) {
    require(!usage_error([&] { combine.call(); }).empty(), what, " was not refused");
  };
  run(c.ranks, describe(c), [&](Rank rank) {
    GuardedBuffer weights(64 * 4 * 4, std::byte{0});
    SyncExchange exchange(rank, c.config);
    const Plan plan = dispatch_and_combine(exchange, c, step, expert_outputs);
    for (const Reduction reduction : {Reduction::exact, Reduction::unreduced}) {
      CombineRun combine(exchange, c, step, expert_outputs, plan, nullptr);
      combine.options().reduction = reduction;
      require_refused(combine, to_string(reduction));
    }
    CombineRun weighted(exchange, c, step, expert_outputs, plan, nullptr);
    weighted.options().topk_weights = weights.as<float>();
    require_refused(weighted, "a weight of a rank_major row");
    dispatch_and_combine(exchange, c, step, expert_outputs);

    SyncExchange unreduced(rank, expert_major.config);
    const Plan expert_major_plan =
        dispatch_and_combine(unreduced, expert_major, expert_major_step, expert_major_outputs);
    CombineRun weighted_rows(unreduced, expert_major, expert_major_step, expert_major_outputs,
                             expert_major_plan, nullptr);
    weighted_rows.options().topk_weights = weights.as<float>();
    require_refused(weighted_rows, "a weight of an unreduced row");
  });
}

}  // namespace
}  // namespace ferry::contract
