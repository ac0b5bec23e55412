// What combine brings home.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "harness/experts.hpp"
#include "harness/harness.hpp"
#include "harness/jitter.hpp"
#include "oracle/combine.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

constexpr DType kTypes[] = {DType::bf16, DType::fp16, DType::fp32};

Case sum_case(Case c, int ranks) {
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
      for (const WeightsFrom from : {WeightsFrom::nowhere, WeightsFrom::rows, WeightsFrom::home}) {
        for (const DType wire : kTypes) {
          Case c = sum_case(small_case(ranks), ranks);
          c.reduction = c.config.reduction = reduction;
          c.weights_from = from;
          c.config.combine_type = wire;
          c.outputs = kTypes[ranks % 3];
          c.result = wire == DType::bf16 ? DType::fp32 : DType::bf16;
          c.any_bits = ranks == 3;
          add(c);
        }
      }
    }
  }
  play_added();
}

// |y - sum w v| in double, against the bound that the order of roundings gives.
void require_within_bound(const Case& c, const Step& step, const oracle::Outcome& outcome, int rank,
                          const CombineRun& played) {
  const int hidden = c.config.hidden, top_k = c.config.top_k;
  const bool partial = c.reduction == Reduction::partial;
  for (int token = 0; token < step.positions.tokens(rank); ++token) {
    for (int column = 0; column < hidden; ++column) {
      double sum = 0, magnitude = 0;
      std::vector<double> on_rank(c.ranks);
      for (int slot = 0; slot < top_k; ++slot) {
        const oracle::RouteTarget& route = step.positions.route(rank, token, slot);
        if (route.row < 0) continue;
        const oracle::RankOutputs& there = outcome.ranks[route.destination];
        const std::byte* v = there.rows.data() + (route.row * hidden + column) * bytes_of(c.outputs);
        const double term = double{there.weights[route.row]} * oracle::load(c.outputs, v);
        sum += term;
        magnitude += std::fabs(term);
        on_rank[route.destination] += term;
      }
      const std::byte* got = played.result_memory().data() + (token * hidden + column) * bytes_of(c.result);
      const double y = oracle::load(c.result, got);
      double bound =
          std::fabs(y) * (c.result == DType::bf16 ? 0x1p-8 : 0x1p-24) + (top_k + 1) * 0x1p-24 * magnitude;
      for (const double p : on_rank) bound += partial ? std::fabs(p) * 0x1p-8 : 0;
      require(std::fabs(y - sum) <= bound, "token ", token, " column ", column, ": ", y, " is not within ",
              bound, " of ", sum);
    }
  }
}

TEST_P(Contract, SumsAreWithinTheirErrorBound) {
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      Case c = sum_case(small_case(ranks), ranks);
      c.config.top_k = 8;
      c.reduction = c.config.reduction = reduction;
      c.result = ranks % 2 ? DType::bf16 : DType::fp32;
      const Step step = make_step(c);
      const oracle::Outcome outcome = make_outcome(c, step);
      run(ranks, describe(c), [&](Rank rank) {
        Exchange exchange(rank, c.config);
        DispatchRun dispatch(exchange, c, step);
        dispatch.run();
        CombineRun combine(exchange, c, step, outcome, dispatch.received().plan, dispatch.received().weight);
        combine.run();
        require_within_bound(c, step, outcome, rank.index(), combine);
      });
    }
  }
}

TEST_P(Contract, UnreducedRows) {
  for (const int ranks : kGroupSizes) {
    for (const DType wire : kTypes) {
      Case c = sum_case(small_case(ranks), ranks);
      c.reduction = c.config.reduction = Reduction::unreduced;
      c.weights_from = WeightsFrom::nowhere;
      c.config.combine_type = c.outputs = wire;
      c.result = ranks % 2 ? wire : DType::fp32;
      c.masked = 0.2;
      c.any_bits = true;  // moved rows keep every bit
      c.values = true;
      c.result_gap = 32;
      add(c);
    }
  }
  play_added();
}

TEST_P(Contract, PartialSendsOneRowForEachTokenAndRank) {
  Case c = sum_case(small_case(1), 4);
  c.config.top_k = 8;
  c.config.max_tokens = 64;
  c.config.hidden = 1024;
  c.full = true;
  const Step step = make_step(c);
  const oracle::Outcome outcome = make_outcome(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    play_step(exchange, c, step, outcome);
    std::set<std::pair<int, std::int64_t>> pairs;  // (remote home, token) with a row here
    for (int home = 0; home < c.ranks; ++home) {
      if (home == rank.index()) continue;
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(step.global.ranks[home].ids.size()); ++i) {
        if (step.global.ranks[home].ids[i] / 4 == rank.index()) pairs.insert({home, i / 8});
      }
    }
    const auto expected = static_cast<double>(pairs.size()) * 2 * 1024;
    const auto bytes = static_cast<double>(exchange.wire_counts().combine_bytes);
    require_equal(exchange.wire_counts().combine_messages, static_cast<std::int64_t>(pairs.size()),
                  "rows sent home");
    require(bytes > 0.97 * expected && bytes < 1.03 * expected, bytes, " bytes, expected about ", expected);
  });
}

TEST_P(Contract, SumsAreTheSameUnderJitter) {
  Case c = sum_case(small_case(1), 4);
  const Step step = make_step(c);
  const oracle::Outcome outcome = make_outcome(c, step);
  if (!Jitter::kAvailable) GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  const Jitter jitter;
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, step);
    dispatch.run();
    for (int repeat = 0; repeat < 1000; ++repeat) {
      CombineRun(exchange, c, step, outcome, dispatch.received().plan, dispatch.received().weight).run();
    }
  });
}

// One pass through a layer of elementwise experts; the result of this rank's tokens.
Buffer through_layer(Exchange& exchange, const Case& c, const Step& step) {
  DispatchRun dispatch(exchange, c, step);
  dispatch.run();
  const DispatchResult& rows = dispatch.received();
  const Buffer outputs = Buffer::of(apply_experts(rows, c.config.hidden, DType::bf16));
  Buffer result(step.positions.tokens(exchange.rank().index()) * c.config.hidden * 2);
  exchange.combine({outputs.data()}, rows.plan, {result.data()}, {.row_weights = rows.weight});
  return result;
}

TEST_P(Contract, ATokenDoesNotFeelItsBatch) {
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    Case c = sum_case(small_case(1), 3);
    c.full = true;
    c.config.reduction = reduction;
    const Step batch = make_step(c);
    run(c.ranks, describe(c), [&](Rank rank) {
      Exchange exchange(rank, c.config);
      const Buffer together = through_layer(exchange, c, batch);
      const std::int64_t row = c.config.hidden * 2;
      for (int token = 0; token < c.config.max_tokens; ++token) {
        // Only this token of rank 1.
        std::vector<std::vector<std::int64_t>> ids(c.ranks);
        const auto first = batch.global.ranks[1].ids.begin() + token * c.config.top_k;
        ids[1].assign(first, first + c.config.top_k);
        Step alone = step_of_ids(c, ids);
        const auto values = batch.global.ranks[1].parts[0].begin() + token * row;
        alone.global.ranks[1].parts[0].assign(values, values + row);
        const auto weights = batch.global.ranks[1].weights.begin() + token * c.config.top_k;
        alone.global.ranks[1].weights.assign(weights, weights + c.config.top_k);
        const Buffer single = through_layer(exchange, c, alone);
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
      Case c = sum_case(small_case(ranks), ranks);
      c.reduction = c.config.reduction = reduction;
      if (reduction == Reduction::unreduced) c.weights_from = WeightsFrom::nowhere;
      c.output_gap = 16 * ranks;
      c.result_gap = 48;
      add(c);
    }
  }
  play_added();
}

TEST_P(Contract, RowValuesBothWays) {
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact, Reduction::unreduced}) {
      Case c = sum_case(small_case(ranks), ranks);
      c.masked = 0.2;
      c.config.alignment = 4;
      c.reduction = c.config.reduction = reduction;
      if (reduction == Reduction::unreduced) c.weights_from = WeightsFrom::nowhere;
      c.values = true;
      const Step step = make_step(c);
      const oracle::Outcome outcome = make_outcome(c, step);
      run(ranks, describe(c), [&](Rank rank) {
        Exchange exchange(rank, c.config);
        const Plan plan = play_step(exchange, c, step, outcome);
        play_route_values(exchange, c, step, plan);
        // Values alone, without rows.
        CombineRun values(exchange, c, step, outcome, plan, nullptr);
        values.options().row_weights = nullptr;
        values.outputs() = {};
        values.result() = {};
        values.call();
        values.compare();
      });
    }
  }
}

TEST_P(Contract, RankMajorRowsAreSumsAlready) {
  for (const int ranks : kGroupSizes) {
    for (const DType wire : kTypes) {
      Case c = sum_case(small_case(ranks), ranks);
      c.config.layout = Layout::rank_major;
      c.config.combine_type = wire;
      c.weights_from = WeightsFrom::nowhere;
      c.any_bits = ranks > 3;
      add(c);
      c.split = true;
      add(c);
      c.split = false;
      c.any_bits = true;
      c.outputs = c.result = wire;
      add(c);
    }
  }
  play_added();
}

// All in one type, as the fastest kernels have it: of one row of weight 1, too, 0 + v is the sum. Some ranks
// have few tokens, some have more than 32, of which few have rows at one other rank.
TEST_P(Contract, SumsOfOneType) {
  for (const int ranks : kGroupSizes) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      for (const WeightsFrom from : {WeightsFrom::nowhere, WeightsFrom::rows, WeightsFrom::home}) {
        for (const DType type : kTypes) {
          Case c = sum_case(small_case(ranks), ranks);
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
  play_added();
}

TEST_P(Contract, WhatCannotBeAddedIsRefused) {
  Case c = sum_case(small_case(1), 2);
  c.config.layout = Layout::rank_major;
  c.config.reduction = Reduction::exact;
  c.weights_from = WeightsFrom::nowhere;
  const Step step = make_step(c);
  const oracle::Outcome outcome = make_outcome(c, step);
  Case major = sum_case(small_case(2), 2);
  major.reduction = major.config.reduction = Reduction::unreduced;
  major.weights_from = WeightsFrom::nowhere;
  const Step major_step = make_step(major);
  const oracle::Outcome major_outcome = make_outcome(major, major_step);
  const auto refused = [](CombineRun& combine, const char* what) {
    try {
      combine.call();
    } catch (const UsageError&) {
      return;
    }
    require(false, what, " was not refused");
  };
  run(c.ranks, describe(c), [&](Rank rank) {
    Buffer weights(64 * 4 * 4, std::byte{0});
    Exchange exchange(rank, c.config);
    const Plan plan = play_step(exchange, c, step, outcome);
    for (const Reduction reduction : {Reduction::exact, Reduction::unreduced}) {
      CombineRun combine(exchange, c, step, outcome, plan, nullptr);
      combine.options().reduction = reduction;
      refused(combine, to_string(reduction));
    }
    CombineRun weighted(exchange, c, step, outcome, plan, nullptr);
    weighted.options().topk_weights = weights.as<float>();
    refused(weighted, "a weight of a rank_major row");
    play_step(exchange, c, step, outcome);

    Exchange unreduced(rank, major.config);
    const Plan major_plan = play_step(unreduced, major, major_step, major_outcome);
    CombineRun weighed(unreduced, major, major_step, major_outcome, major_plan, nullptr);
    weighed.options().topk_weights = weights.as<float>();
    refused(weighed, "a weight of an unreduced row");
  });
}

}  // namespace
}  // namespace ferry::contract
