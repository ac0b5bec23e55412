// Replicated input: every rank passes the same tokens and ids, keeps the routes to its own experts, and
// combine gives it its own sum.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/combine.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

TestCase replicated_case(TestCase c, int ranks) {
  c.ranks = ranks;
  c.config.experts = 16;
  c.config.top_k = 4;
  c.config.max_tokens = 9;
  c.config.hidden = 80;
  c.config.alignment = 2;
  c.config.input = Input::replicated;
  c.tokens.assign(static_cast<std::size_t>(ranks), 7);
  c.masked = 0.1;
  return c;
}

TEST_P(Contract, ReplicatedInputInEveryLayoutAndForm) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      TestCase c = replicated_case(small_case(ranks), ranks);
      c.config.layout = layout;
      if (layout == Layout::rank_major) {
        c.config.alignment = 1;
        c.weights_from = WeightsFrom::none;
      }
      c.config.format = ranks == 4 ? Format::fp8_e4m3() : Format::bf16();
      run_sequences(GetParam(), {c});  // sources, load counts, no messages, by plan
      c.split_phases = true;
      c.result = DType::fp32;
      add(c);
      if (layout == Layout::rank_major) continue;
      c.split_phases = false;
      c.weights_from = WeightsFrom::topk_weights;
      c.row_values = true;
      add(c);
    }
  }
  run_added();
}

// The results of all ranks, added in rank order from +0 and rounded once.
std::vector<std::byte> all_reduced(const Rank& rank, const GuardedBuffer& result, DType type) {
  const std::int64_t bytes = result.bytes();
  std::vector<std::byte> all(static_cast<std::size_t>(bytes * rank.size()));
  rank.all_gather(result.data(), all.data(), static_cast<std::size_t>(bytes));
  std::vector<std::byte> sums(static_cast<std::size_t>(bytes / 4 * bytes_of(type)));
  for (std::int64_t i = 0; i < bytes / 4; ++i) {
    float sum = 0;
    for (int from = 0; from < rank.size(); ++from)
      sum += oracle::load(DType::fp32, all.data() + from * bytes + 4 * i);
    oracle::store(type, sum, sums.data() + i * bytes_of(type));
  }
  return sums;
}

// The same tokens as those of rank 0 alone give every rank the same rows, and `partial` the same sums.
TEST_P(Contract, ReplicatedResultsAddUpToPartial) {
  for (const int ranks : {1, 2, 4, 8}) {
    TestCase c = replicated_case(small_case(10 + ranks), ranks);
    c.result = DType::fp32;
    const StepInputs step = make_inputs(c);
    oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    TestCase plain = c;
    plain.config.input = Input::own;
    plain.config.reduction_level = ReductionLevel::rank;
    std::vector<std::vector<std::int64_t>> ids(static_cast<std::size_t>(ranks));
    ids[0] = step.inputs.ranks[0].ids;
    const StepInputs plain_step = inputs_from_ids(plain, ids);
    oracle::ExpertOutputs rounded = outputs;
    rounded.result = DType::bf16;
    const std::vector<std::byte> expected =
        oracle::combined(plain.config, plain_step.positions, rounded, Topology::blocks(ranks, 1), 0);
    run(ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      DispatchRun dispatch(exchange, c, step);
      dispatch.run();
      for (std::int64_t row = 0; row < *dispatch.received().total; ++row) {
        const int source = dispatch.received().source[row].rank;
        require(source == rank.index() || source == -1, "row ", row, " is of rank ", source);
      }
      CombineRun combine(exchange, c, step, outputs, dispatch.received().plan, dispatch.received().weight);
      combine.run();
      require(all_reduced(rank, combine.result_memory(), DType::bf16) == expected,
              "the results of all ranks do not add up to partial");
      const WireCounts wire = exchange.wire_counts();
      require_equal(wire.dispatch_bytes + wire.combine_bytes, std::int64_t{0}, "bytes sent");
      require_equal(exchange.dispatch_counts(dispatch.ids(), 7).total,
                    std::int64_t{*dispatch.received().total}, "total of dispatch_counts");
    });
  }
}

// Seven tokens on four of the ranks: each token has its shared rows once.
TEST_P(Contract, SplitSharedRowsCoverEveryTokenOnce) {
  for (const int ranks : {4, 8}) {
    TestCase c = replicated_case(small_case(20 + ranks), ranks);
    c.config.shared_experts = 2;
    c.config.shared_split = 4;
    run_sequences(GetParam(), {c});
    c.split_phases = c.shared_outputs = true;
    add(c);
    run_added();
    c.split_phases = c.shared_outputs = false;
    c.config.combine_type = c.result = c.outputs = DType::fp32;
    const StepInputs step = make_inputs(c);
    oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    std::vector<int> taken(7), sizes;
    for (int r = 0; r < ranks; ++r) {
      const oracle::RankRows& rows = step.positions.ranks[r];
      for (std::size_t row = 0; row < rows.rows.size(); ++row) {
        const Source& source = rows.rows[row].source;
        const float value =
            source.slot >= c.config.top_k ? 1.0f : 0.0f;  // only shared experts return something
        if (source.slot == c.config.top_k) ++taken[source.token];
        std::byte* out = outputs.ranks[r].rows.data() + row * c.config.hidden * 4;
        for (int column = 0; column < c.config.hidden; ++column)
          oracle::store(DType::fp32, value, out + 4 * column);
      }
      if (r < 4) {
        sizes.push_back(rows.counts[0]);
      } else {
        EXPECT_EQ(rows.counts[0], 0);
      }
    }
    EXPECT_EQ(taken, std::vector<int>(7, 1));
    EXPECT_LE(*std::max_element(sizes.begin(), sizes.end()) - *std::min_element(sizes.begin(), sizes.end()),
              1);
    std::vector<std::byte> twos(7 * c.config.hidden * 4);
    for (std::size_t at = 0; at < twos.size(); at += 4) oracle::store(DType::fp32, 2, twos.data() + at);
    run(ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      DispatchRun dispatch(exchange, c, step);
      dispatch.run();
      CombineRun combine(exchange, c, step, outputs, dispatch.received().plan, dispatch.received().weight);
      combine.run();
      require(all_reduced(rank, combine.result_memory(), DType::fp32) == twos,
              "the shared term is not there once");
    });
  }
}

TEST_P(Contract, ReplicatedInputsThatDifferAreRefused) {
  const TestCase c = replicated_case(small_case(30), 3);
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const bool odd = rank.index() == 1;
    const auto require_difference = [&](const std::string& words,
                                        const std::function<void(DispatchRun&)>& call) {
      DispatchRun dispatch(exchange, c, step);
      const std::string text = usage_error([&] { call(dispatch); });
      require(text.find(words) != std::string::npos, "expected '", words, "', got '", text, "'");
      const std::string remedy = ": pass the same on every rank";
      require(text.ends_with(remedy), "expected '", remedy, "', got '", text, "'");
    };
    require_difference("hash of the replicated input's N and ids", [&](DispatchRun& dispatch) {
      if (odd) --dispatch.tokens().count;
      dispatch.call();
    });
    GuardedBuffer ids = GuardedBuffer::of(std::vector<std::int32_t>(7 * 4, 2));
    if (odd) ids.as<std::int32_t>()[7 * 4 - 1] = 3;
    require_difference("hash of the replicated input's N and ids", [&](DispatchRun& dispatch) {
      exchange.dispatch(dispatch.tokens(), Ids(ids.as<std::int32_t>()), dispatch.weights(),
                        dispatch.options());
    });
    const Plan plan = dispatch_and_combine(exchange, c, step, outputs);
    CombineRun combine(exchange, c, step, outputs, plan, nullptr);
    if (odd) combine.options().reduction = Reduction::exact;
    require_refused("replicated input has the reduction partial only", [&] { combine.call(); });
  });
}

}  // namespace
}  // namespace ferry::contract
