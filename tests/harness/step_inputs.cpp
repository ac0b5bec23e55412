#include "harness/step_inputs.hpp"

#include <algorithm>
#include <cstring>

#include "harness/guarded_buffer.hpp"
#include "oracle/dispatch.hpp"
#include "oracle/encode.hpp"

namespace ferry::contract {
namespace {

// Streams of numbers that must not depend on one another.
enum RandomStream : std::uint64_t {
  kTokens = 1,
  kIds,
  kValues,
  kWeights,
  kOutputs,
  kTopkWeights,
  kRowValues,
  kDotRows
};

Random stream(const Case& c, RandomStream which, int step, int rank) {
  return Random::of({c.seed, which, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(rank)});
}

int draw_expert(const Case& c, Random& random, const Placement& placement) {
  const int experts = c.config.experts;
  const int favourite = static_cast<int>(c.seed % static_cast<std::uint64_t>(experts));
  switch (c.routing) {
    case Routing::uniform:
      break;
    case Routing::skewed: {
      const double u = random.unit();
      return (favourite + static_cast<int>(u * u * u * experts)) % experts;
    }
    case Routing::one_expert:
      return favourite;
    case Routing::one_rank: {
      const std::vector<int>& held = placement.experts_of(placement.place(favourite).rank);
      return held[random.below(static_cast<std::int64_t>(held.size()))];
    }
  }
  return random.below(experts);
}

std::int64_t draw_bad_id(const Case& c, Random& random) {
  const std::int64_t experts = c.config.experts;
  if (c.ids == IdType::int64 && random.chance(0.5))
    return random.pick({(1LL << 32) + 1, -(1LL << 40), 1LL << 62});
  return random.pick<std::int64_t>({experts, experts + 1, -2, 0x7FFFFFFF, -0x7FFFFFFF - 1});
}

std::vector<std::int64_t> draw_ids(const Case& c, Random& random, std::int64_t tokens,
                                   const Placement& placement) {
  std::vector<std::int64_t> ids;
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::vector<std::int64_t> list(c.config.top_k, -1);
    const bool whole_masked = random.chance(c.masked_tokens);
    for (std::int64_t& id : list) {
      if (whole_masked || random.chance(c.masked)) continue;
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

int draw_tokens(const Case& c, int step, int rank) {
  if (!c.tokens.empty()) return c.tokens[rank];
  if (c.full) return c.config.max_tokens;
  Random random = stream(c, kTokens, step, rank);
  return random.chance(0.1) ? 0 : random.between(0, c.config.max_tokens);
}

void draw_values(const Case& c, int step, oracle::GlobalInputs& global) {
  for (int rank = 0; rank < c.ranks; ++rank) {
    oracle::RankInputs& inputs = global.ranks[rank];
    Random values = stream(c, kValues, step, rank), weights = stream(c, kWeights, step, rank);
    const auto row_bytes = oracle::input_row_bytes(global.format, global.type, c.config.hidden);
    const bool raw = global.format.kind == FormatKind::raw;
    for (std::size_t part = 0; part < row_bytes.size(); ++part) {
      const DType type = raw ? DType::fp32 : global.type;
      inputs.parts[part] =
          random_rows(values, type, inputs.tokens * row_bytes[part] / bytes_of(type), c.any_bits || raw);
    }
    inputs.weights =
        c.weighted ? random_floats(weights, inputs.tokens * c.config.top_k) : std::vector<float>();
  }
}

oracle::GlobalInputs empty_inputs(const Case& c) {
  oracle::GlobalInputs global;
  global.config = c.config;
  global.config.placement = oracle::placement_of(c.config, c.ranks);
  global.format = c.config.format;
  global.type = c.type;
  global.weighted = c.weighted;
  global.apply_weights = c.apply_weights;
  global.ranks.resize(c.ranks);
  return global;
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

// Rows a combine must not read are NaN, the others random.
std::vector<std::byte> draw_outputs(const Case& c, const Step& step, int rank) {
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
  for (float& value : values) value = static_cast<float>(random.unit() * 2 - 0.5);
  return values;
}

Step make_step(const Case& c, int index) {
  std::vector<std::vector<std::int64_t>> ids;
  const Placement placement = oracle::placement_of(c.config, c.ranks);
  for (int rank = 0; rank < c.ranks; ++rank) {
    Random random = stream(c, kIds, index, rank);
    ids.push_back(draw_ids(c, random, draw_tokens(c, index, rank), placement));
  }
  return step_of_ids(c, ids, index);
}

Step step_of_ids(const Case& c, const std::vector<std::vector<std::int64_t>>& ids, int index) {
  Step step;
  step.index = index;
  step.global = empty_inputs(c);
  for (int rank = 0; rank < c.ranks; ++rank) {
    step.global.ranks[rank].ids = ids[rank];
    step.global.ranks[rank].tokens = static_cast<std::int64_t>(ids[rank].size()) / c.config.top_k;
  }
  draw_values(c, index, step.global);
  step.positions = oracle::find_row_positions(step.global);
  return step;
}

Step with_values(const Case& c, const Step& routed, int index) {
  Step step;
  step.index = index;
  step.global = empty_inputs(c);
  for (int rank = 0; rank < c.ranks; ++rank) {
    step.global.ranks[rank].ids = routed.global.ranks[rank].ids;
    step.global.ranks[rank].tokens = routed.global.ranks[rank].tokens;
  }
  draw_values(c, index, step.global);
  step.positions = routed.positions;
  return step;
}

std::vector<std::byte> make_dot_rows(const Case& c, const Step& step, int rank) {
  Random random = stream(c, kDotRows, step.index, rank);
  const auto rows = static_cast<std::int64_t>(step.positions.ranks[rank].rows.size());
  return random_rows(random, c.config.combine_type, rows * c.config.hidden, c.any_bits);
}

oracle::Outcome make_outcome(const Case& c, const Step& step) {
  oracle::Outcome outcome;
  outcome.outputs = c.outputs;
  outcome.result = c.result;
  outcome.reduction = c.reduction;
  outcome.weighted = c.weights_from == WeightsFrom::rows;
  outcome.topk_weighted = c.weights_from == WeightsFrom::home;
  for (int rank = 0; rank < c.ranks; ++rank) {
    oracle::RankOutputs outputs;
    outputs.rows = draw_outputs(c, step, rank);
    if (outcome.weighted) outputs.weights = oracle::row_metadata(step.global, step.positions, rank).weight;
    Random home = stream(c, kTopkWeights, step.index, rank), values = stream(c, kRowValues, step.index, rank);
    outputs.topk_weights = random_floats(home, step.positions.tokens(rank) * c.config.top_k);
    outputs.row_values =
        random_floats(values, static_cast<std::int64_t>(step.positions.ranks[rank].rows.size()));
    outcome.ranks.push_back(std::move(outputs));
  }
  return outcome;
}

}  // namespace ferry::contract
