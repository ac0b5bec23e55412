// Experts sliced by tensor parallelism (Placement::ep_tp): the rows, results and bytes are those of an
// exchange without slices, on a rank for each sub-group.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/combine.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/gather.hpp"

namespace ferry::contract {
namespace {

// The case without slices: `ep` ranks.
TestCase unsliced_case(TestCase c, int ep, const std::vector<int>& tokens) {
  c.ranks = ep;
  c.tokens = tokens;
  c.config.experts = 8;
  c.config.top_k = 3;
  c.config.max_tokens = 9;
  c.config.hidden = 48;
  c.config.alignment = 4;
  c.config.reduction_level = ReductionLevel::rank;
  if (on_device(c.config)) c.config.deadline = 4;
  c.masked = 0.2;
  return c;
}

Config sliced(const TestCase& c, int tp) {
  Config config = c.config;
  config.placement = Placement::ep_tp(c.config.experts, c.ranks, tp);
  return config;
}

struct Slice {
  std::int64_t first, end;
};
Slice slice_of(std::int64_t tokens, int i, int tp) {
  return {i * tokens / tp, (i + 1) * tokens / tp};
}

// The tp rank that sends a token of rank `source` of the case without slices.
int sender(const TestCase& c, int source, int token, int tp) {
  for (int i = 0; i < tp; ++i) {
    const Slice slice = slice_of(c.tokens[static_cast<std::size_t>(source)], i, tp);
    if (token >= slice.first && token < slice.end) return i;
  }
  throw Mismatch("no slice has the token");
}

// The inputs of a rank's dispatch, where its backend can read them.
struct PassedInputs {
  explicit PassedInputs(const oracle::RankInputs& inputs)
      : count(inputs.tokens),
        rows(GuardedBuffer::of(inputs.parts[0])),
        ids(GuardedBuffer::of(inputs.ids)),
        weights(GuardedBuffer::of(inputs.weights)) {}

  DispatchResult dispatch(SyncExchange& exchange, const TestCase& c, bool weighted) {
    return exchange.dispatch(Tokens::rows(rows.data(), count, c.type), ids.as<std::int64_t>(),
                             weighted ? weights.as<float>() : nullptr);
  }

  std::int64_t count;
  GuardedBuffer rows, ids, weights;
};

void check_received(const TestCase& c, const StepInputs& step, int tp, int rank, const DispatchResult& got) {
  const oracle::RankRows& expected = step.positions.ranks[static_cast<std::size_t>(rank / tp)];
  require_equal_lists<std::int32_t>(got.counts, expected.counts, "counts");
  require_equal_lists<std::int32_t>(got.row_offsets, expected.row_offsets, "row_offsets");
  require_equal_lists<std::int32_t>(got.group_expert, expected.group_expert, "group_expert");
  require_equal(std::int64_t{*got.total}, static_cast<std::int64_t>(expected.rows.size()), "total");
  require_equal(got.host->total, std::int64_t{*got.total}, "total in host memory");
  const oracle::RowMetadata metadata = oracle::row_metadata(step.inputs, step.positions, rank / tp);
  const auto shapes = oracle::received_shapes(step.inputs, step.positions, rank / tp);
  for (std::size_t row = 0; row < expected.rows.size(); ++row) {
    Source source = metadata.source[row];
    if (source.rank >= 0) source.rank = source.rank * tp + sender(c, source.rank, source.token, tp);
    require(got.source[row] == source, "source of row ", row);
    if (step.inputs.weighted) require_equal(got.weight[row], metadata.weight[row], "weight of row ", row);
  }
  for (std::size_t p = 0; p < shapes.size(); ++p) {
    const std::int64_t bytes = got.parts[p].row_bytes * *got.total;
    std::vector<std::byte> rows(static_cast<const std::byte*>(got.parts[p].data),
                                static_cast<const std::byte*>(got.parts[p].data) + bytes);
    const std::vector<std::byte> received = rows;
    oracle::write_part(step.inputs, step.positions, rank / tp, static_cast<int>(p), rows.data());
    require(received == rows, "part ", p, " has other bytes than without slices");
  }
}

// Every route goes to e / (E / ep) * tp + tp_rank.
void check_destinations(const TestCase& c, const StepInputs& step, int tp, int rank, const Plan& plan) {
  const auto group = static_cast<std::size_t>(rank / tp);
  const Slice slice = slice_of(c.tokens[group], rank % tp, tp);
  require_equal(std::int64_t{plan.tokens()}, slice.end - slice.first, "tokens of the plan");
  for (std::int64_t token = slice.first; token < slice.end; ++token) {
    for (int slot = 0; slot < c.config.top_k; ++slot) {
      const std::int64_t e = step.inputs.ranks[group].ids[token * c.config.top_k + slot];
      const std::int64_t expected = e < 0 ? -1 : e / (c.config.experts / c.ranks) * tp + rank % tp;
      require_equal(std::int64_t{plan.destination(static_cast<int>(token - slice.first), slot)}, expected,
                    "destination of token ", token, ", slot ", slot);
    }
  }
}

// The outputs of each slice of an expert. Padding rows hold NaN, which must not be read.
std::vector<oracle::ExpertOutputs> outputs_of_slices(const TestCase& c, const StepInputs& step, int tp) {
  std::vector<oracle::ExpertOutputs> all;
  for (int i = 0; i < tp; ++i) {
    TestCase other = c;
    other.seed += static_cast<std::uint64_t>(1000 * i);
    all.push_back(make_expert_outputs(other, step));
  }
  return all;
}

// The outputs of the exchange without slices: their sums in tp order, in the combine type.
oracle::ExpertOutputs added(const TestCase& c, const std::vector<oracle::ExpertOutputs>& slices) {
  oracle::ExpertOutputs sums = slices[0];
  for (std::size_t rank = 0; rank < sums.ranks.size(); ++rank) {
    std::vector<oracle::Bytes> rows;
    for (const oracle::ExpertOutputs& slice : slices) rows.push_back(slice.ranks[rank].rows);
    const std::int64_t total =
        static_cast<std::int64_t>(rows[0].size()) / (c.config.hidden * bytes_of(c.outputs));
    sums.ranks[rank].rows = oracle::scattered_sums(rows, c.outputs, c.config.hidden, 0, total);
  }
  return sums;
}

// A message of a token. Devices start rows at lines, and send 16 bytes for each slot.
std::int64_t message_bytes(const TestCase& c, bool on_device) {
  const std::int64_t values = 2 * c.config.hidden, top_k = c.config.top_k;
  return on_device ? oracle::round_up(values, 128) + 16 * top_k
                   : values + oracle::round_up(8 + 8 * top_k, 16);
}

// Checks the bytes that one rank sends in a dispatch and a combine, in a group of one node, by the formula of
// the contract.
void check_bytes(const TestCase& c, const StepInputs& step, int tp, int rank, const WireCounts& wire,
                 bool on_device) {
  const int top_k = c.config.top_k, group = rank / tp, i = rank % tp;
  const std::int64_t values = 2 * c.config.hidden;
  const Slice slice = slice_of(c.tokens[static_cast<std::size_t>(group)], i, tp);
  std::int64_t messages = 0, partial = 0;
  std::vector<std::int64_t> rows(static_cast<std::size_t>(tp), 0);  // by the tp rank that sent them
  for (int source = 0; source < c.ranks; ++source) {
    for (int token = 0; token < c.tokens[static_cast<std::size_t>(source)]; ++token) {
      const int from = sender(c, source, token, tp);
      std::set<int> destinations;
      for (int slot = 0; slot < top_k; ++slot) {
        const int to = step.positions.route(source, token, slot).destination;
        if (to >= 0) destinations.insert(to);
        if (to == group) ++rows[static_cast<std::size_t>(from)];
      }
      destinations.erase(source);
      if (source == group && token >= slice.first && token < slice.end)
        messages += static_cast<std::int64_t>(destinations.size());
      if (from == i && source != group) partial += static_cast<std::int64_t>(destinations.count(group));
    }
  }
  std::int64_t of_others = 0;
  for (int other = 0; other < tp; ++other) {
    if (other != i) of_others += rows[static_cast<std::size_t>(other)];
  }
  const std::int64_t own = rows[static_cast<std::size_t>(i)];
  require_equal(wire.dispatch_messages, messages + (tp - 1) * own, "dispatch messages");
  require_equal(wire.dispatch_bytes, messages * message_bytes(c, on_device) + (tp - 1) * own * (values + 16),
                "dispatch bytes");
  require_equal(wire.combine_messages, partial + of_others + (tp - 1) * (slice.end - slice.first),
                "combine messages");
  require_equal(wire.combine_bytes,
                partial * values + of_others * values +
                    (tp - 1) * (slice.end - slice.first) * c.config.hidden * bytes_of(c.result),
                "combine bytes");
}

void run_step(const TestCase& c, SyncExchange& exchange, int tp, int index) {
  const StepInputs step = make_inputs(c, index);
  const std::vector<oracle::ExpertOutputs> slices = outputs_of_slices(c, step, tp);
  const oracle::ExpertOutputs sums = added(c, slices);
  const int rank = exchange.rank().index(), group = rank / tp;
  PassedInputs mine(step.inputs.ranks[static_cast<std::size_t>(group)]);
  const DispatchResult received = mine.dispatch(exchange, c, step.inputs.weighted);
  check_received(c, step, tp, rank, received);
  check_destinations(c, step, tp, rank, received.plan);
  const oracle::RankOutputs& outputs =
      slices[static_cast<std::size_t>(rank % tp)].ranks[static_cast<std::size_t>(group)];
  const std::vector<std::byte> expected =
      oracle::combined(c.config, step.positions, sums, Topology::blocks(c.ranks, 1), group);
  GuardedBuffer result(static_cast<std::int64_t>(expected.size()));
  CombineOptions options{.reduction = c.reduction};
  GuardedBuffer rows = GuardedBuffer::of(outputs.rows),
                weights = GuardedBuffer::of(sums.ranks[static_cast<std::size_t>(group)].weights),
                topk_weights = GuardedBuffer::of(sums.ranks[static_cast<std::size_t>(group)].topk_weights);
  if (sums.weighted) options.row_weights = weights.as<float>();
  if (sums.topk_weighted) options.topk_weights = topk_weights.as<float>();  // without tokens too
  exchange.combine({.data = outputs.rows.empty() ? nullptr : rows.data(), .type = c.outputs}, received.plan,
                   {.data = expected.empty() ? nullptr : result.data(), .type = c.result}, options);
  require_equal_bytes(result.span(), expected, 2, "result");
  result.require_guards("result");
}

void run_steps(const TestCase& c, int tp, const Config& config, const Rank& rank) {
  SyncExchange exchange(rank, config);
  for (int index = 0; index < 3; ++index) {
    const WireCounts before = exchange.wire_counts();
    run_step(c, exchange, tp, index);
    if (index > 0 || rank.topology().nodes() > 1 || c.reduction != Reduction::partial ||
        c.config.format != Format::bf16() || config.memory == MemoryKind::device ||
        c.weights_from == WeightsFrom::topk_weights)
      continue;
    require_equal(before.dispatch_bytes, std::int64_t{0}, "bytes before the first call");
    check_bytes(c, make_inputs(c, index), tp, rank.index(), exchange.wire_counts(),
                config.backend == BackendKind::cuda);
  }
}

TEST_P(Contract, SlicedExpertsGiveTheRowsAndResultsOfWholeOnes) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "experts in slices do not run in two hops on device memory";
  for (const int tp : {1, 2, 4}) {
    for (const std::vector<int>& tokens :
         {std::vector<int>{7, 4}, std::vector<int>{1, 3}, std::vector<int>{0, 9}, std::vector<int>{0, 0}}) {
      for (const int variant : {0, 1, 2, 3, 4}) {
        // Processes on a GPU take their time.
        if (GetParam().on_device() && variant > 0 && tokens[0] == 0) continue;
        TestCase c = unsliced_case(small_case(static_cast<std::uint64_t>(10 * tp + variant)), 2, tokens);
        if (variant == 1) c.config.format = Format::fp8_e4m3();
        if (variant == 2) c.reduction = c.config.reduction = Reduction::exact;
        if (variant == 3) {
          c.reduction = c.config.reduction = Reduction::unreduced;
          c.weights_from = WeightsFrom::none;
        }
        if (variant == 4) c.weights_from = WeightsFrom::topk_weights;
        const Config config = sliced(c, tp);
        run(2 * tp, describe(c), [&](Rank rank) { run_steps(c, tp, config, rank); });
      }
    }
  }
}

TEST_P(Contract, SlicedExpertsInRandomCases) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "experts in slices do not run in two hops on device memory";
  Random random(seed_of(60));
  for (std::uint64_t number = 0; number < 12; ++number) {
    const int ep = static_cast<int>(random.pick({1, 2, 4})), tp = static_cast<int>(random.pick({2, 3}));
    if (ep * tp > 8) continue;
    std::vector<int> tokens;
    for (int group = 0; group < ep; ++group) tokens.push_back(static_cast<int>(random.between(0, 9)));
    TestCase c = unsliced_case(small_case(100 + number), ep, tokens);
    c.config.alignment = static_cast<int>(random.pick({1, 4, 16}));
    c.config.zero_padding = random.chance(0.5);
    if (random.chance(0.4)) c.config.format = random.chance(0.5) ? Format::fp8_e4m3() : Format::mxfp8();
    c.duplicates = c.config.repeats = random.chance(0.3);
    c.masked_tokens = 0.2;
    c.reduction = c.config.reduction = random.pick({Reduction::partial, Reduction::exact});
    c.weights_from = random.pick({WeightsFrom::row_weights, WeightsFrom::topk_weights, WeightsFrom::none});
    c.weighted = c.weighted || c.weights_from == WeightsFrom::row_weights;
    c.result = random.pick({DType::bf16, DType::fp32});
    const Config config = sliced(c, tp);
    run(ep * tp, describe(c), [&](Rank rank) { run_steps(c, tp, config, rank); });
  }
}

TEST_P(Contract, SlicedExpertsRefuseWhatTheyDoNotHave) {
  TestCase c = unsliced_case(small_case(2), 2, {5, 3});
  // Combine refuses a missing result in other words on a rank that has received no rows. Without masked slots
  // each rank receives some, but for 1 draw in 500,000.
  c.masked = 0;
  const Config config = sliced(c, 2);
  if (!GetParam().has_gathers()) {
    run(4, describe(c), [&](Rank rank) { require_error("one hop", [&] { SyncExchange(rank, config); }); });
    return;
  }
  run(4, describe(c), [&](Rank rank) {
    const auto refused = [&](const char* words, auto change) {
      Config wrong = config;
      change(wrong);
      require_error(words, [&] { SyncExchange(rank, wrong); });
    };
    refused("expert_padded", [](Config& wrong) { wrong.layout = Layout::expert_padded; });
    refused("shared experts", [](Config& wrong) { wrong.shared_experts = 1; });
    refused("local_slots", [](Config& wrong) { wrong.local_slots = 8; });
    refused("gathered input", [](Config& wrong) {
      wrong.transfer = Transfer::gather;
      wrong.hops = Hops::one;
    });
    refused("replicated input", [](Config& wrong) { wrong.input = Input::replicated; });
    refused("capacity = 8 with tp = 2", [](Config& wrong) { wrong.capacity = 8; });
    SyncExchange exchange(rank, config);
    const StepInputs step = make_inputs(c);
    PassedInputs mine(step.inputs.ranks[static_cast<std::size_t>(rank.index() / 2)]);
    const bool odd = rank.index() == 3;
    mine.count -= odd ? 1 : 0;
    require_error("2 tokens on rank 3, 3 on rank 2", [&] { mine.dispatch(exchange, c, true); });
    mine.count += odd ? 1 : 0;
    std::int64_t& id = *mine.ids.as<std::int64_t>();
    const std::int64_t kept = std::exchange(id, odd ? id == 1 ? 2 : 1 : id);
    require_error("the ids on rank 3 are not those on rank 2", [&] { mine.dispatch(exchange, c, true); });
    id = kept;
    const Tokens tokens = Tokens::rows(mine.rows.data(), mine.count, c.type);
    require_error("phases", [&] { exchange.dispatch_send(tokens, mine.ids.as<std::int64_t>()); });
    require_error("dispatch_counts",
                  [&] { exchange.dispatch_counts(mine.ids.as<std::int64_t>(), mine.count); });
    const DispatchResult received = mine.dispatch(exchange, c, true);
    require_error("a dispatch by plan", [&] {
      exchange.dispatch(Tokens::rows(mine.rows.data(), received.plan.tokens(), c.type), received.plan);
    });
    GuardedBuffer rows(*received.total * 2 * c.config.hidden + 16, std::byte{0}),
        result(9 * 2 * c.config.hidden);
    require_error("result is null for the 3 tokens of rank 3", [&] {
      exchange.combine({.data = rows.data()}, received.plan, {.data = odd ? nullptr : result.data()}, {});
    });
    for (const bool returns : {false, true}) {
      require_error(returns ? "return_values" : "route_values", [&] {
        float* const values = result.as<float>();
        if (returns) exchange.return_values(rows.as<float>(), received.plan, values);
        if (!returns) exchange.route_values(values, received.plan, rows.as<float>());
      });
    }
    run_step(c, exchange, 2, 1);  // the exchange stays usable
  });
}

}  // namespace
}  // namespace ferry::contract
