// MAX's call shapes (ferry/max.hpp): what dispatch returns, and combine from src_info, row_offsets and
// counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "contract/max_calls.hpp"
#include "harness/harness.hpp"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::contract {
namespace {

const oracle::RankInputs& inputs_of(const StepInputs& step, int rank) {
  return step.inputs.ranks[static_cast<std::size_t>(rank)];
}

Tokens tokens_of(const TestCase& c, const StepInputs& step, int rank) {
  const oracle::RankInputs& mine = inputs_of(step, rank);
  Tokens tokens{.count = mine.tokens, .type = c.type};
  for (std::size_t p = 0; p < mine.parts.size(); ++p) tokens.parts[p] = mine.parts[p].data();
  return tokens;
}

// How the case's dispatches encode. `step` must live as long.
max::DispatchOptions dispatch_options(const TestCase& c, const StepInputs& step) {
  const Format& format = step.inputs.format;
  max::DispatchOptions made{.format = format, .input_scales = step.inputs.input_scales};
  if (format.kind == FormatKind::nvfp4 && !format.nvfp4_options.per_token && !c.input_scales)
    made.global_scale = &step.inputs.global_scale;
  return made;
}

// Compares MAX's arrays with the oracle's rows, by a plain loop.
void check_received(const StepInputs& step, int rank, const MaxArrays& got) {
  const oracle::RankRows& expected = step.positions.ranks[static_cast<std::size_t>(rank)];
  std::vector<std::uint32_t> offsets;
  std::vector<std::int32_t> ids, info;
  std::vector<std::int32_t> counts(expected.counts.size() * step.positions.ranks.size());
  std::int32_t most = 0;
  for (std::size_t group = 0; group < expected.counts.size(); ++group) {
    most = std::max(most, expected.counts[group]);
    if (expected.counts[group] == 0) continue;
    offsets.push_back(static_cast<std::uint32_t>(expected.row_offsets[group]));
    ids.push_back(static_cast<std::int32_t>(group));
  }
  offsets.push_back(static_cast<std::uint32_t>(expected.rows.size()));
  for (const oracle::RowInfo& row : expected.rows) {
    info.insert(info.end(), {row.source.token, row.source.slot});
    if (row.state == oracle::RowState::kept)
      ++counts[static_cast<std::size_t>(row.group) * step.positions.ranks.size() +
               static_cast<std::size_t>(row.source.rank)];
  }
  require(got.row_offsets == offsets, "row_offsets differ");
  require(got.expert_ids == ids, "expert_ids differ");
  require(got.src_info == info, "src_info differs");
  require(got.counts == counts, "counts differ");
  require_equal(got.expert_usage_stats[0], static_cast<std::uint32_t>(most), "most rows of a group");
  require_equal(got.expert_usage_stats[1], static_cast<std::uint32_t>(ids.size()), "groups with rows");
  const auto shapes = oracle::received_shapes(step.inputs, step.positions, rank);
  const auto groups = static_cast<std::int64_t>(expected.counts.size());
  for (std::size_t p = 0; p < kMaxParts; ++p)
    require((got.parts[p].row_bytes > 0) == (p < shapes.size()), "part ", p, " is ",
            p < shapes.size() ? "lost" : "there");
  const bool tiled = shapes.size() > 1 && shapes[1].tile_blocks > 0;
  require((got.tile_offsets != nullptr) == tiled, "tile_offsets");
  if (tiled)
    require(std::ranges::equal(std::span(got.tile_offsets, expected.counts.size() + 1),
                               oracle::group_tiles(step.inputs, step.positions, rank)),
            "tile_offsets differ");
  for (std::size_t p = 0; p < shapes.size(); ++p) {
    const std::int64_t bytes = shapes[p].bytes_of(expected.capacity, groups);
    const auto* const data = static_cast<const std::byte*>(got.parts[p].data);
    std::vector<std::byte> rows(data, data + bytes);
    const std::vector<std::byte> received = rows;
    oracle::write_part(step.inputs, step.positions, rank, static_cast<int>(p), rows.data());
    require(received == rows, "part ", p, " differs");
  }
}

// How the calls of a step are made.
struct Form {
  bool split = false;
  bool pass_ids = false;     // CombineInput::topk_ids; else those of the lane's last dispatch
  bool other_order = false;  // the rows of a group from one rank are in another order than they came
  int lane = 0;
};

MaxArrays dispatch(MaxCalls& exchange, const TestCase& c, const StepInputs& step, Form form) {
  const int rank = exchange.rank().index();
  const Ids ids = inputs_of(step, rank).ids.data();
  const Tokens tokens = tokens_of(c, step, rank);
  max::DispatchOptions options = dispatch_options(c, step);
  options.call.lane = form.lane;
  if (!form.split) return exchange.ep_fused_dispatch(tokens, ids, options);
  exchange.ep_dispatch_async(tokens, ids, options);
  return exchange.ep_dispatch_wait(form.lane);
}

// Reverses the rows of every routed group from every rank, as a dispatch in another order would have.
void reverse_rows(const Config& config, int ranks, std::int64_t row_bytes, MaxArrays& received,
                  std::vector<std::byte>& rows) {
  for (std::size_t i = 0; i < received.expert_ids.size(); ++i) {
    const auto group = static_cast<std::size_t>(received.expert_ids[i]);
    std::size_t row = received.row_offsets[i];
    for (std::size_t source = 0; source < static_cast<std::size_t>(ranks); ++source) {
      const auto count =
          static_cast<std::size_t>(received.counts[group * static_cast<std::size_t>(ranks) + source]);
      for (std::size_t a = row, b = row + count;
           static_cast<int>(group) >= config.shared_experts && a + 1 < b; ++a) {
        --b;
        std::swap_ranges(&received.src_info[2 * a], &received.src_info[2 * a] + 2, &received.src_info[2 * b]);
        std::swap_ranges(&rows[a * static_cast<std::size_t>(row_bytes)],
                         &rows[a * static_cast<std::size_t>(row_bytes)] + row_bytes,
                         &rows[b * static_cast<std::size_t>(row_bytes)]);
      }
      row += count;
    }
  }
}

void combine(MaxCalls& exchange, const TestCase& c, const StepInputs& step,
             const oracle::ExpertOutputs& outputs, MaxArrays received, Form form) {
  const int rank = exchange.rank().index();
  const oracle::RankOutputs& mine = outputs.ranks[static_cast<std::size_t>(rank)];
  std::vector<std::byte> rows = mine.rows;
  if (form.other_order)
    reverse_rows(c.config, c.ranks, c.config.hidden * bytes_of(c.outputs), received, rows);
  max::CombineInput input({.data = rows.empty() ? nullptr : rows.data(), .type = c.outputs}, received);
  if (form.pass_ids) {
    input.topk_ids = inputs_of(step, rank).ids.data();
    input.tokens = inputs_of(step, rank).tokens;
  }
  const auto expected = oracle::combined(c.config, step.positions, outputs, exchange.rank().topology(), rank);
  const auto shared = oracle::returned_shared_rows(c.config, step.positions, outputs, rank);
  GuardedBuffer result(static_cast<std::int64_t>(expected.size())),
      apart(static_cast<std::int64_t>(shared.size()));
  const max::CombineOutput output{
      .output_tokens = {.data = expected.empty() ? nullptr : result.data(), .type = c.result},
      .router_weights = outputs.topk_weighted ? mine.topk_weights.data() : nullptr,
      .shared_outputs = c.shared_outputs && c.config.shared_experts > 0 ? apart.data() : nullptr};
  if (form.split) {
    exchange.ep_combine_async(input, output, form.lane);
    std::ranges::fill(rows, std::byte{0xFF});  // outputs and arrays may be reused after the send phase
    std::ranges::fill(received.src_info, 7);
    std::ranges::fill(received.counts, 7);
    std::ranges::fill(received.row_offsets, 7);
    exchange.ep_combine_wait(form.lane);
  } else {
    exchange.ep_fused_combine(input, output, form.lane);
  }
  require_equal_bytes(result.span(), expected, 2, "result");
  result.require_guards("result");
  if (output.shared_outputs == nullptr) return;
  require_equal_bytes(apart.span(), shared, 2, "shared_outputs");
  apart.require_guards("shared_outputs");
}

TEST_P(Contract, MaxCombinesFromSrcInfo) {
  for (const int ranks : kGroupSizes) {
    for (const int variant : {0, 1, 2, 3, 4, 5, 6}) {
      const Reduction reduction = variant % 2 == 0 ? Reduction::exact : Reduction::unreduced;
      TestCase c = max_case(small_case(static_cast<std::uint64_t>(100 * ranks + variant)), ranks,
                            variant == 6 ? 2 : variant / 2, reduction);
      if (variant == 1) c.config.format = Format::fp8_e4m3();
      if (variant == 2) c.config.alignment = 4;
      if (variant == 3) c.duplicates = true;
      if (variant == 4) c.weights_from = WeightsFrom::none;
      if (variant == 5) c.config.lanes = 2;
      if (variant == 6) {
        c.shared_outputs = true;
        c.outputs = DType::fp32;
      }
      run(ranks, describe(c), [&](Rank rank) {
        MaxCalls exchange(rank, c.config);
        for (int index = 0; index < 4; ++index) {
          const StepInputs step = make_inputs(c, index);
          const Form form{.split = index % 2 == 1,
                          .pass_ids = index == 2,
                          .other_order = index >= 2,
                          .lane = index % c.config.lanes};
          MaxArrays received = dispatch(exchange, c, step, form);
          check_received(step, rank.index(), received);
          combine(exchange, c, step, make_expert_outputs(c, step), std::move(received), form);
        }
      });
    }
  }
}

// skip_a2a: every rank has the same tokens, and sums the rows of its own experts.
TEST_P(Contract, MaxSkipsTheTransfer) {
  for (const int ranks : kGroupSizes) {
    for (const int shared : {0, 1, 2}) {
      TestCase c = max_case(small_case(static_cast<std::uint64_t>(300 + 10 * ranks + shared)), ranks, shared,
                            Reduction::partial);
      c.tokens.assign(static_cast<std::size_t>(ranks), 7);
      c.duplicates = shared == 1;
      c.config.alignment = shared == 2 ? 4 : 1;
      // Shared rows of a token on one rank, where some ranks have none, and on every rank.
      c.config = max::skip_a2a(c.config, shared == 2 ? 0 : (ranks + 1) / 2);
      run(ranks, describe(c), [&](Rank rank) {
        MaxCalls exchange(rank, c.config);
        for (int index = 0; index < 4; ++index) {
          TestCase of_call = c;
          if (index % 2 == 0) of_call.weights_from = WeightsFrom::topk_weights;  // fused calls
          const StepInputs step = make_inputs(of_call, index);
          const Form form{.split = index % 2 == 1, .pass_ids = index >= 2, .other_order = index >= 2};
          MaxArrays received = dispatch(exchange, of_call, step, form);
          check_received(step, rank.index(), received);
          combine(exchange, of_call, step, make_expert_outputs(of_call, step), std::move(received), form);
        }
      });
    }
  }
}

// Every part of the received rows in every format: also the scales of tokens, raw parts, tiles.
TEST_P(Contract, MaxReceivesAllPartsOfEveryFormat) {
  for (const char* name : {"bf16",
                           "fp16",
                           "fp32",
                           "fp8",
                           "fp8-columns",
                           "fp8-pow2",
                           "fp8-columns-pow2-packed",
                           "mxfp8",
                           "mxfp8-columns",
                           "mxfp8-tiles",
                           "mxfp4",
                           "mxfp4-columns",
                           "mxfp4-tiles",
                           "nvfp4",
                           "nvfp4-columns",
                           "nvfp4-tiles",
                           "nvfp4-token",
                           "nvfp4-token-columns",
                           "nvfp4-token-tiles",
                           "raw:32+16",
                           "raw:48+16+32+16"}) {
    for (const bool input_scales : {false, true}) {
      TestCase c = max_case(small_case(9), 3, 1, Reduction::exact);
      c.config.hidden = 96;
      c.config.alignment = 4;
      c.config.format = parse_format(name);
      c.type = natural_type(c.config.format);
      c.global_scale = name == std::string("nvfp4") ? 0.0123f : 1.0f;
      c.input_scales = input_scales;
      if (input_scales && std::ranges::none_of(std::vector<std::string>{"fp8", "mxfp8", "nvfp4"},
                                               [&](const std::string& each) { return each == name; }))
        continue;
      run(c.ranks, describe(c), [&](Rank rank) {
        MaxCalls exchange(rank, exchange_config(c));
        for (int index = 0; index < 2; ++index) {
          const StepInputs step = make_inputs(c, index);
          check_received(step, rank.index(), dispatch(exchange, c, step, {.split = index == 1}));
        }
      });
    }
  }
}

// Groups of 2, 0 and 3 rows on rank 0, and of 1, 1 and 0 on rank 1.
TEST_P(Contract, MaxListsTheGroupsThatHaveRows) {
  TestCase c = max_case(small_case(8), 2, 0, Reduction::exact);
  c.config.experts = 6;
  c.config.top_k = 2;
  c.config.alignment = 1;
  c.tokens = {2, 2};
  c.config.local_slots = 4;  // the last group is empty
  const StepInputs step = inputs_from_ids(c, {{0, 2, 2, 3}, {2, 0, -1, 4}}, 0);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    MaxCalls exchange(rank, c.config);
    const MaxArrays received = dispatch(exchange, c, step, {});
    const bool first = rank.index() == 0;
    using Offsets = std::vector<std::uint32_t>;
    using Numbers = std::vector<std::int32_t>;
    require(received.row_offsets == (first ? Offsets{0, 2, 5} : Offsets{0, 1, 2}), "row_offsets");
    require(received.expert_ids == (first ? Numbers{0, 2} : Numbers{0, 1}), "expert_ids");
    require(received.expert_usage_stats == std::array<std::uint32_t, 2>{first ? 3u : 1u, 2u},
            "expert_usage_stats");
    require(received.counts == (first ? Numbers{1, 1, 0, 0, 2, 1, 0, 0} : Numbers{1, 0, 0, 1, 0, 0, 0, 0}),
            "counts");
    require(received.src_info == (first ? Numbers{0, 0, 0, 1, 0, 1, 1, 0, 0, 0} : Numbers{1, 1, 1, 1}),
            "src_info");
    combine(exchange, c, step, outputs, received, {});
  });
}

// The arrays of a dispatch serve after later dispatches, with the ids of their own.
TEST_P(Contract, MaxCombinesAnEarlierDispatch) {
  const TestCase c = max_case(small_case(7), 4, 1, Reduction::exact);
  run(c.ranks, describe(c), [&](Rank rank) {
    MaxCalls exchange(rank, c.config);
    const StepInputs first = make_inputs(c, 0), second = make_inputs(c, 1);
    const MaxArrays earlier = dispatch(exchange, c, first, {});
    const MaxArrays later = dispatch(exchange, c, second, {});
    combine(exchange, c, second, make_expert_outputs(c, second), later, {});
    combine(exchange, c, first, make_expert_outputs(c, first), earlier, {.pass_ids = true});
  });
}

TEST_P(Contract, MaxCombineEqualsCombineByPlan) {
  for (const Reduction reduction : {Reduction::exact, Reduction::unreduced}) {
    const TestCase c = max_case(small_case(3), 4, 0, reduction);
    run(c.ranks, describe(c), [&](Rank rank) {
      const int me = rank.index();
      const StepInputs step = make_inputs(c);
      const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
      const oracle::RankOutputs& mine = outputs.ranks[static_cast<std::size_t>(me)];
      GuardedBuffer row_memory = GuardedBuffer::of(mine.rows),
                    tokens = GuardedBuffer::of(inputs_of(step, me).parts[0]),
                    id_memory = GuardedBuffer::of(inputs_of(step, me).ids),
                    weight_memory = GuardedBuffer::of(mine.topk_weights);
      const Outputs rows{.data = mine.rows.empty() ? nullptr : row_memory.data()};
      const std::size_t slots = reduction == Reduction::unreduced ? 3 : 1;
      GuardedBuffer by_plan(inputs_of(step, me).tokens * static_cast<std::int64_t>(slots) * 96),
          by_info(by_plan.bytes());
      const Ids ids = id_memory.as<std::int64_t>();
      const float* const weights = outputs.topk_weighted ? weight_memory.as<float>() : nullptr;
      const Tokens input = Tokens::rows(tokens.data(), inputs_of(step, me).tokens, c.type);
      SyncExchange with_plans(rank, c.config);
      const DispatchResult received = with_plans.dispatch(input, ids, nullptr);
      with_plans.combine(rows, received.plan, {.data = by_plan.data()}, {.topk_weights = weights});
      MaxCalls exchange(rank, c.config);
      const MaxArrays arrays = exchange.ep_fused_dispatch(input, ids);
      exchange.ep_fused_combine({rows, arrays},
                                {.output_tokens = {.data = by_info.data()}, .router_weights = weights});
      require(std::ranges::equal(by_plan.span(), by_info.span()),
              "combine from src_info gives other bytes than combine by plan");
    });
  }
}

}  // namespace
}  // namespace ferry::contract
