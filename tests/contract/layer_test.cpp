// Whole layers: agreement between backends and between numbers of ranks, gradients, load counts, recorded
// routing, random cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "ferry/trace.hpp"
#include "harness/experts.hpp"
#include "harness/harness.hpp"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

// Those of the oracle, poison where a call must not write included.
TEST_P(Contract, BackendsProduceTheSameBytes) {
  const Format formats[] = {Format::bf16(),
                            Format::fp16(),
                            Format::fp32(),
                            Format::fp8_e4m3(),
                            Format::fp8_e4m3({.column_major = true, .power_of_two = true, .packed = true}),
                            Format::raw({128, 32})};
  std::uint64_t number = 0;
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
    for (const Format& format : formats) {
      TestCase c = small_case(++number);
      c.ranks = 3;
      c.config.layout = layout;
      c.config.format = format;
      c.config.zero_padding = true;
      c.config.alignment = layout == Layout::rank_major ? 1 : 4;
      c.type = natural_type(format);
      c.any_bits = number % 2 == 0;
      c.weights_from = layout == Layout::rank_major ? WeightsFrom::none : WeightsFrom::row_weights;
      add(c);
    }
  }
  run_added();
}

TEST_P(Contract, ExactSumsDoNotDependOnRankCount) {
  constexpr int kTokens = 16, kTopK = 4, kExperts = 16, kHidden = 48;
  Random random(seed_of(1));
  std::vector<std::int64_t> ids;
  for (int i = 0; i < kTokens * kTopK; ++i) ids.push_back(random.chance(0.1) ? -1 : random.below(kExperts));
  const std::vector<float> weights = random_floats(random, kTokens * kTopK);
  const std::vector<std::byte> values = random_rows(random, DType::bf16, kTokens * kHidden, false);
  std::vector<std::byte> expected(values.size());
  for (int i = 0; i < kTokens * kHidden; ++i) {
    float sum = 0;
    for (int slot = 0; slot < kTopK; ++slot) {
      const int route = i / kHidden * kTopK + slot;
      if (ids[route] < 0) continue;
      const float x = oracle::load(DType::bf16, values.data() + i * 2);
      sum = std::fma(weights[route], expert_value(static_cast<int>(ids[route]), x, DType::bf16), sum);
    }
    oracle::store(DType::bf16, sum, expected.data() + i * 2);
  }
  for (const int ranks : {1, 2, 4, 8}) {
    Config config =
        on_backend({.experts = kExperts, .top_k = kTopK, .hidden = kHidden, .max_tokens = kTokens});
    config.reduction = Reduction::exact;
    config.repeats = true;
    config.placement = draw_placement(random, kExperts, ranks);
    const int mine = kTokens / ranks;
    run(ranks, str("R = ", ranks), [&](Rank rank) {
      SyncExchange exchange(rank, config);
      const std::int64_t bytes = mine * kHidden * 2, first = rank.index() * bytes;
      GuardedBuffer tokens(bytes), result(bytes);
      std::memcpy(tokens.data(), values.data() + first, bytes);
      const std::int64_t routes = mine * kTopK, route = rank.index() * routes;
      GuardedBuffer my_ids(routes * 8), my_weights(routes * 4);
      std::copy_n(ids.data() + route, routes, my_ids.as<std::int64_t>());
      std::copy_n(weights.data() + route, routes, my_weights.as<float>());
      const DispatchResult rows = exchange.dispatch(Tokens::rows(tokens.data(), mine),
                                                    my_ids.as<std::int64_t>(), my_weights.as<float>());
      const std::vector<std::byte> expert_rows = apply_experts(rows, kHidden, DType::bf16);
      const GuardedBuffer outputs = GuardedBuffer::of(expert_rows);
      exchange.combine({outputs.data()}, rows.plan, {result.data()}, {.row_weights = rows.weight});
      require_equal_bytes(result.span(), std::span(expected).subspan(first, bytes), 2, "result");
    });
  }
}

// Rows multiplied by their weights, their dot products with the outputs, and the dots returned to the source
// ranks.
TEST_P(Contract, CombineBackward) {
  for (const int ranks : kGroupSizes) {
    for (const Format& format : {Format::bf16(), Format::fp16(), Format::fp32()}) {
      TestCase c = small_case(ranks);
      c.ranks = ranks;
      c.config.top_k = 3;
      c.config.hidden = 336;
      c.config.alignment = 4;
      c.config.format = format;
      c.config.combine_type = c.outputs = ranks % 2 ? DType::bf16 : DType::fp32;
      c.type = natural_type(format);
      c.masked = 0.2;
      const StepInputs forward = make_inputs(c);
      const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, forward);
      TestCase backward_case = c;
      backward_case.apply_weights = backward_case.dots = true;
      const StepInputs gradient = with_new_values(backward_case, forward, 3);
      oracle::ExpertOutputs dots = make_expert_outputs(backward_case, gradient);
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<std::byte> v = make_dot_rows(backward_case, gradient, rank);
        dots.ranks[rank].row_values =
            oracle::row_dots(gradient.inputs, gradient.positions, rank, v.data(), c.config.combine_type);
      }
      run(ranks, describe(backward_case), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        const Plan plan = dispatch_and_combine(exchange, c, forward, expert_outputs);
        const std::vector<float> expected =
            oracle::returned_row_values(gradient.positions, dots, rank.index());
        GuardedBuffer d_weights(static_cast<std::int64_t>(expected.size()) * 4);
        DispatchRun backward(exchange, backward_case, gradient);
        backward.run_backward(plan, d_weights.as<float>());
        d_weights.require_contents(bytes_of_values(expected), 4, "d_weights");
      });
    }
  }
}

// Forward and backward through a layer of elementwise experts in fp32, compared with sums in double over the
// whole layer.
TEST_P(Contract, GradientsMatchADenseLayer) {
  TestCase c = small_case(1);
  c.ranks = 4;
  c.config.experts = 12;
  c.config.top_k = 3;
  c.config.hidden = 64;
  c.config.format = Format::fp32();
  c.type = c.outputs = c.result = c.config.combine_type = DType::fp32;
  const StepInputs forward = make_inputs(c), gradient = with_new_values(c, forward, 1);
  run(c.ranks, describe(c), [&](Rank rank) {
    const oracle::RankInputs &x_in = forward.inputs.ranks[rank.index()],
                             &g_in = gradient.inputs.ranks[rank.index()];
    const auto tokens = static_cast<int>(x_in.tokens), hidden = c.config.hidden, top_k = c.config.top_k;
    SyncExchange exchange(rank, c.config);
    DispatchRun dispatch(exchange, c, forward);
    dispatch.run();
    const Plan plan = dispatch.received().plan.copy();
    const std::vector<std::byte> expert_rows = apply_experts(dispatch.received(), hidden, DType::fp32);
    const GuardedBuffer outputs = GuardedBuffer::of(expert_rows);
    GuardedBuffer result(tokens * hidden * 4), d_input(tokens * hidden * 4);
    exchange.combine({outputs.data(), DType::fp32}, plan, {result.data(), DType::fp32},
                     {.row_weights = dispatch.received().weight});

    // Backward: to the rows, through the experts, back to the source ranks.
    const GuardedBuffer g = GuardedBuffer::of(g_in.parts[0]);
    GuardedBuffer weights = GuardedBuffer::of(x_in.weights), d_weights(tokens * top_k * 4);
    const DispatchResult d_rows =
        exchange.combine_backward(Tokens::rows(g.data(), tokens, DType::fp32), plan, weights.as<float>(),
                                  {outputs.data(), DType::fp32}, d_weights.as<float>());
    const std::vector<std::byte> d_expert_rows =
        apply_experts(d_rows, hidden, DType::fp32);  // linear experts: the gradient has the same factor
    const GuardedBuffer d_outputs = GuardedBuffer::of(d_expert_rows);
    exchange.combine({d_outputs.data(), DType::fp32}, plan, {d_input.data(), DType::fp32});

    const auto value = [&](const oracle::RankInputs& in, int token, int column) {
      return double{oracle::load(DType::fp32, in.parts[0].data() + (token * hidden + column) * 4)};
    };
    const auto near = [](double got, double expected, double scale, const auto&... what) {
      require(std::fabs(got - expected) <= 1e-5 * scale + 1e-30, what..., ": got ", got, ", expected ",
              expected);
    };
    for (int token = 0; token < tokens; ++token) {
      double sum = 0, magnitude = 0;  // over slots, of weight times factor
      for (int slot = 0; slot < top_k; ++slot) {
        const int route = token * top_k + slot;
        if (x_in.ids[route] < 0) continue;
        const double factor = expert_factor(static_cast<int>(x_in.ids[route]));
        sum += x_in.weights[route] * factor;
        magnitude += std::fabs(x_in.weights[route] * factor);
        double product = 0, scale = 0;
        for (int column = 0; column < hidden; ++column) {
          const double term = value(g_in, token, column) * factor * value(x_in, token, column);
          product += term;
          scale += std::fabs(term);
        }
        near(d_weights.as<float>()[route], product, scale, "d_weights of token ", token, " slot ", slot);
      }
      for (int column = 0; column < hidden; ++column) {
        const double x = value(x_in, token, column), dy = value(g_in, token, column);
        const int at = token * hidden + column;
        near(result.as<float>()[at], sum * x, magnitude * std::fabs(x), "y of token ", token);
        near(d_input.as<float>()[at], sum * dy, magnitude * std::fabs(dy), "dx of token ", token);
      }
    }
  });
}

TEST_P(Contract, LoadCountsMatchTheRouting) {
  TestCase c = small_case(1);
  c.ranks = 3;
  c.config.experts = 7;
  c.config.lanes = 2;
  c.config.layers = 3;
  c.masked = 0.2;
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    std::vector<std::int64_t> experts(7), layers(21), ranks(3);
    for (int index = 0; index < 6; ++index) {
      TestCase call = c;
      call.lane = index % 2;
      call.layer = index / 2;
      const StepInputs step = make_inputs(call, index);
      DispatchRun(exchange, call, step).run();
      for (const oracle::RankInputs& inputs : step.inputs.ranks) {
        for (const std::int64_t id : inputs.ids) {
          if (id < 0) continue;
          ++experts[id];
          ++layers[7 * call.layer + id];
          ++ranks[exchange.config().placement.location(static_cast<int>(id)).rank];
        }
      }
    }
    // Two threads ask at once.
    LoadCounts counts[2];
    std::thread other([&] { counts[1] = exchange.load_counts(); });
    counts[0] = exchange.load_counts();
    other.join();
    for (const LoadCounts& load : counts) {
      require_equal(load.dispatches, std::int64_t{6}, "dispatches");
      require_equal_lists<std::int64_t>(load.experts.data(), experts, "routes to expert");
      require_equal_lists<std::int64_t>(load.layers.data(), layers, "routes by layer");
      require_equal_lists<std::int64_t>(load.ranks.data(), ranks, "routes to rank");
    }
  });
}

TEST_P(Contract, LayersOutOfRangeAreRefused) {
  TestCase c = small_case(1);
  c.ranks = 2;
  c.config.layers = 2;
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    for (const int wrong : {-1, 2}) {
      TestCase call = c;
      call.layer = wrong;
      const StepInputs step = make_inputs(call);
      require_refused(str("layer = ", wrong, " on rank "), [&] { DispatchRun(exchange, call, step).run(); });
    }
  });
}

// Runs three layers of a trace.
void run_trace(const Setup& setup, const Trace& trace, int ranks, Layout layout) {
  TestCase c;
  c.seed = seed_of(ranks);
  c.ranks = ranks;
  setup.choose_backend(c.config);
  c.config.experts = trace.experts;
  c.config.top_k = trace.top_k;
  c.config.hidden = 32;
  c.config.max_tokens = 48;
  c.config.layout = layout;
  if (layout == Layout::rank_major) c.weights_from = WeightsFrom::none;
  for (const int layer : {0, trace.layers / 2, trace.layers - 1}) {
    std::vector<std::vector<std::int64_t>> ids;
    std::vector<std::vector<float>> weights;
    for (int rank = 0; rank < ranks; ++rank) {
      const TracePartition part =
          partition(trace, {.layer = layer, .rank = rank, .ranks = ranks, .tokens_per_rank = 48});
      ids.emplace_back(part.ids.begin(), part.ids.end());
      weights.push_back(part.weights);
    }
    StepInputs step = inputs_from_ids(c, ids, layer);
    for (int rank = 0; rank < ranks; ++rank) step.inputs.ranks[rank].weights = weights[rank];
    run_case(setup, c, step);
  }
}

TEST_P(Contract, RecordedRouting) {
  const char* folder = std::getenv("FERRY_TRACES");
  if (folder == nullptr && std::getenv("CI") != nullptr) FAIL() << "FERRY_TRACES is not set";
  const std::string name =
      folder != nullptr ? "olmoe_1b_7b/github" : "synth:decode:experts=64,tokens=512,layers=3";
  const Trace trace = open_trace(name);
  for (const int ranks : kGroupSizes) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      run_trace(GetParam(), trace, ranks, layout);
    }
  }
}

TEST_P(Contract, RandomCases) {
  for (int number = 0; number < 30; ++number) {
    const TestCase c = draw_case(seed_of(static_cast<std::uint64_t>(number)), CaseSize::small);
    ASSERT_TRUE(run_sequences(GetParam(), {c})) << "case " << number;
  }
}

}  // namespace
}  // namespace ferry::contract
