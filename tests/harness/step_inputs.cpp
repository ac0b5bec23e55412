#include "harness/step_inputs.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "harness/guarded_buffer.hpp"
#include "harness/own_format.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/encode.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

// Independent random sequences.
enum RandomStream : std::uint64_t {
  kTokens = 1,
  kIds,
  kValues,
  kWeights,
  kOutputs,
  kTopkWeights,
  kRowValues,
  kDotRows,
  kInputScales,
  kOwnTokens
};

Random stream(const TestCase& c, RandomStream which, int step, int rank) {
  return Random::of({c.seed, which, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(rank)});
}

// The rank whose random sequence the inputs of `rank` come from: replicated inputs are the same everywhere.
int source_of_inputs(const TestCase& c, int rank) {
  return c.config.input == Input::replicated ? 0 : rank;
}

int draw_expert(const TestCase& c, Random& random, const Placement& placement) {
  const int experts = c.config.experts;
  const int favourite = static_cast<int>(c.seed % static_cast<std::uint64_t>(experts));
  switch (c.routing) {
    case Routing::uniform:
      break;
    case Routing::skewed: {
      const double u = random.uniform();
      return (favourite + static_cast<int>(u * u * u * experts)) % experts;
    }
    case Routing::one_expert:
      return favourite;
    case Routing::one_rank: {
      const std::vector<int>& held = placement.experts_of(placement.location(favourite).rank);
      return held[random.below(static_cast<std::int64_t>(held.size()))];
    }
  }
  return random.below(experts);
}

std::int64_t draw_bad_id(const TestCase& c, Random& random) {
  const std::int64_t experts = c.config.experts;
  if (c.ids == IdType::int64 && random.chance(0.5))
    return random.pick({(1LL << 32) + 1, -(1LL << 40), 1LL << 62});
  return random.pick<std::int64_t>({experts, experts + 1, -2, 0x7FFFFFFF, -0x7FFFFFFF - 1});
}

std::vector<std::int64_t> draw_ids(const TestCase& c, Random& random, std::int64_t tokens,
                                   const Placement& placement) {
  std::vector<std::int64_t> ids;
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::vector<std::int64_t> list(c.config.top_k, -1);
    const bool token_masked = random.chance(c.masked_tokens);
    for (std::int64_t& id : list) {
      if (token_masked || random.chance(c.masked)) continue;
      for (int attempt = 0; attempt < 20 && id < 0; ++attempt) {
        const int expert = draw_expert(c, random, placement);
        if (c.duplicates || std::find(list.begin(), list.end(), expert) == list.end()) id = expert;
      }
    }
    random.shuffle(list);
    for (std::int64_t& id : list) {
      if (random.chance(c.bad_ids)) id = draw_bad_id(c, random);
    }
    ids.insert(ids.end(), list.begin(), list.end());
  }
  return ids;
}

int draw_tokens(const TestCase& c, int step, int rank) {
  if (!c.tokens.empty()) return c.tokens[rank];
  if (c.full) return c.config.max_tokens;
  Random random = stream(c, kTokens, step, rank);
  return random.chance(0.1) ? 0 : random.between(0, c.config.max_tokens);
}

void draw_values(const TestCase& c, int step, oracle::GlobalInputs& all) {
  for (int rank = 0; rank < c.ranks; ++rank) {
    oracle::RankInputs& inputs = all.ranks[rank];
    const int drawn = source_of_inputs(c, rank);
    Random values = stream(c, kValues, step, drawn), weights = stream(c, kWeights, step, drawn);
    const auto row_bytes = oracle::input_row_bytes(all.format, all.type, c.config.hidden);
    const bool raw = all.format.is_raw();
    for (std::size_t part = 0; part < row_bytes.size(); ++part) {
      const DType type = raw ? DType::fp32 : all.type;
      inputs.parts[part] =
          random_rows(values, type, inputs.tokens * row_bytes[part] / bytes_of(type), c.any_bits || raw);
    }
    inputs.weights =
        c.weighted ? random_floats(weights, inputs.tokens * c.config.top_k) : std::vector<float>();
  }
}

// Tokens, the first of them zeros, and their encoded rows in place of the parts that were drawn.
void draw_own_tokens(const TestCase& c, StepInputs& step) {
  if (!c.own_format) return;
  const std::int64_t hidden = c.config.hidden, size = bytes_of(c.type);
  for (int rank = 0; rank < c.ranks; ++rank) {
    oracle::RankInputs& inputs = step.inputs.ranks[rank];
    Random random = stream(c, kOwnTokens, step.index, source_of_inputs(c, rank));
    std::vector<std::byte> tokens = random_rows(random, c.type, inputs.tokens * hidden, false);
    if (inputs.tokens > 0) std::fill_n(tokens.begin(), hidden * size, std::byte{0});
    inputs.parts = {};
    for (std::int64_t token = 0; token < inputs.tokens; ++token) {
      std::vector<float> values;
      for (std::int64_t column = 0; column < hidden; ++column)
        values.push_back(oracle::load(c.type, tokens.data() + (token * hidden + column) * size));
      append_own_row(values, inputs.parts);
    }
    step.own_tokens.push_back(std::move(tokens));
  }
}

oracle::GlobalInputs empty_inputs(const TestCase& c, int step) {
  oracle::GlobalInputs all;
  all.config = c.config;
  all.config.placement = oracle::placement_of(c.config, c.ranks);
  all.format = c.config.format;
  all.type = c.type;
  all.weighted = c.weighted;
  all.apply_weights = c.apply_weights;
  all.global_scale = c.global_scale;
  if (c.input_scales) {
    Random random = stream(c, kInputScales, step, 0);
    for (int expert = 0; expert < c.config.experts + c.config.shared_experts; ++expert)
      all.input_scales.push_back(
          static_cast<float>(0.001 + random.uniform() * random.pick({0.01, 1.0, 30.0})));
  }
  all.ranks.resize(c.ranks);
  return all;
}

std::uint32_t with_exponent_near_one(std::uint32_t bits, DType type) {
  switch (type) {
    case DType::bf16:
      return (bits & 0x807Fu) | ((120 + (bits >> 24) % 12) << 7);
    case DType::fp16:
      return (bits & 0x83FFu) | ((10 + (bits >> 24) % 9) << 10);
    case DType::fp32:
      break;
  }
  return (bits & 0x807FFFFFu) | ((120 + (bits >> 24) % 12) << 23);
}

// Kept rows are random; rows that combine must not read are NaN.
std::vector<std::byte> draw_outputs(const TestCase& c, const StepInputs& step, int rank) {
  Random random = stream(c, kOutputs, step.index, rank);
  const auto& rows = step.positions.ranks[rank].rows;
  const std::int64_t row_bytes = c.config.hidden * bytes_of(c.outputs);
  std::vector<std::byte> all(rows.size() * row_bytes, kNan);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state != oracle::RowState::kept) continue;
    const std::vector<std::byte> values = random_rows(random, c.outputs, c.config.hidden, c.any_bits);
    std::copy(values.begin(), values.end(), all.begin() + static_cast<std::int64_t>(row) * row_bytes);
  }
  return all;
}

}  // namespace

std::vector<std::byte> random_rows(Random& random, DType type, std::int64_t count, bool any_bits) {
  const std::int64_t size = bytes_of(type);
  std::vector<std::byte> rows(count * size);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t drawn = random.next();
    auto bits = static_cast<std::uint32_t>(drawn >> 32);
    if (!any_bits) bits = with_exponent_near_one(bits, type);
    if (any_bits && drawn % 8 == 0) bits &= type == DType::fp32 ? 0x80000000u : 0x8000u;  // 0 and -0
    std::memcpy(rows.data() + i * size, &bits, static_cast<std::size_t>(size));
  }
  return rows;
}

std::vector<float> random_floats(Random& random, std::int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.uniform() * 2 - 0.5);
  return values;
}

StepInputs make_inputs(const TestCase& c, int index) {
  std::vector<std::vector<std::int64_t>> ids;
  const Placement placement = oracle::placement_of(c.config, c.ranks);
  for (int rank = 0; rank < c.ranks; ++rank) {
    const int drawn = source_of_inputs(c, rank);
    Random random = stream(c, kIds, index, drawn);
    ids.push_back(draw_ids(c, random, draw_tokens(c, index, drawn), placement));
  }
  return inputs_from_ids(c, ids, index);
}

StepInputs inputs_from_ids(const TestCase& c, const std::vector<std::vector<std::int64_t>>& ids, int index) {
  StepInputs step;
  step.index = index;
  step.inputs = empty_inputs(c, index);
  for (int rank = 0; rank < c.ranks; ++rank) {
    step.inputs.ranks[rank].ids = ids[rank];
    step.inputs.ranks[rank].tokens = static_cast<std::int64_t>(ids[rank].size()) / c.config.top_k;
  }
  draw_values(c, index, step.inputs);
  draw_own_tokens(c, step);
  step.positions = oracle::find_row_positions(step.inputs);
  return step;
}

StepInputs with_new_values(const TestCase& c, const StepInputs& routed, int index) {
  StepInputs step;
  step.index = index;
  step.inputs = empty_inputs(c, index);
  for (int rank = 0; rank < c.ranks; ++rank) {
    step.inputs.ranks[rank].ids = routed.inputs.ranks[rank].ids;
    step.inputs.ranks[rank].tokens = routed.inputs.ranks[rank].tokens;
  }
  draw_values(c, index, step.inputs);
  draw_own_tokens(c, step);
  step.positions = routed.positions;
  return step;
}

std::vector<std::byte> make_dot_rows(const TestCase& c, const StepInputs& step, int rank) {
  Random random = stream(c, kDotRows, step.index, rank);
  const auto rows = static_cast<std::int64_t>(step.positions.ranks[rank].rows.size());
  return random_rows(random, c.config.combine_type, rows * c.config.hidden, c.any_bits);
}

oracle::ExpertOutputs make_expert_outputs(const TestCase& c, const StepInputs& step) {
  oracle::ExpertOutputs expert_outputs;
  expert_outputs.outputs = c.outputs;
  expert_outputs.result = c.result;
  expert_outputs.reduction = c.reduction;
  expert_outputs.weighted = c.weights_from == WeightsFrom::row_weights;
  expert_outputs.topk_weighted = c.weights_from == WeightsFrom::topk_weights;
  expert_outputs.shared_outputs = c.shared_outputs && c.config.shared_experts > 0;
  for (int rank = 0; rank < c.ranks; ++rank) {
    oracle::RankOutputs outputs;
    outputs.rows = draw_outputs(c, step, rank);
    if (expert_outputs.weighted)
      outputs.weights = oracle::row_metadata(step.inputs, step.positions, rank).weight;
    Random topk_weights = stream(c, kTopkWeights, step.index, rank),
           values = stream(c, kRowValues, step.index, rank);
    outputs.topk_weights = random_floats(topk_weights, step.positions.tokens(rank) * c.config.top_k);
    outputs.row_values =
        random_floats(values, static_cast<std::int64_t>(step.positions.ranks[rank].rows.size()));
    expert_outputs.ranks.push_back(std::move(outputs));
  }
  return expert_outputs;
}

PreparedStep prepare(const TestCase& c, int index) {
  StepInputs step = make_inputs(c, index);
  oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
  return {c, std::move(step), std::move(expert_outputs)};
}

std::vector<PreparedStep> prepare_steps(const TestCase& c, int count) {
  std::vector<PreparedStep> steps;
  for (int index = 0; index < count; ++index) steps.push_back(prepare(c, index));
  return steps;
}

}  // namespace ferry::contract
