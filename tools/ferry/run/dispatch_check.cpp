#include "tools/ferry/run/dispatch_check.hpp"

#include <fmt/core.h>

#include <cmath>
#include <cstring>

#include "backends/cpu/kernels.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::app {

namespace {

constexpr std::int64_t kBlock = 128;  // columns with one scale

// The value an e4m3 code stands for: sign, four bits of exponent (bias 7), three of fraction.
float value_of_e4m3(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                        : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

float scale_of(const std::vector<std::byte>& scales, std::int64_t block, bool packed) {
  if (packed) return std::ldexp(1.0F, std::to_integer<int>(scales[at(block)]) - 127);
  float scale = 0;
  std::memcpy(&scale, &scales[at(block * 4)], sizeof scale);
  return scale;
}

bool same_bits(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

oracle::GlobalInputs empty_inputs(const Job& job) {
  oracle::GlobalInputs global;
  global.config = job.config;
  global.format = job.config.format;
  global.type = job.type;
  global.weighted = true;
  return global;
}

}  // namespace

struct StepOracle::Row {
  int rank;
  std::int64_t index;
  const oracle::RowInfo* placed;

  bool kept() const { return placed->state == oracle::RowState::kept; }
  const Source& from() const { return placed->source; }
};

StepOracle::StepOracle(const Job& job, int step)
    : job_(job), step_(step), global_(empty_inputs(job)), one_(empty_inputs(job)) {
  for (int rank = 0; rank < job.options.ranks; ++rank) {
    Routes routes = make_routes(job, step, rank);
    oracle::RankInputs& inputs = global_.ranks.emplace_back();
    inputs.tokens = job.tokens();
    inputs.ids.assign(routes.ids.begin(), routes.ids.end());
    inputs.weights = std::move(routes.weights);
  }
  positions_ = oracle::find_row_positions(global_);
  one_.ranks.resize(1);
  one_.ranks[0].tokens = 1;
  one_.ranks[0].parts[0].resize(at(job.row_bytes()));
}

void StepOracle::check(int rank, const DispatchResult& received, Tally& tally) {
  if (!check_tables(rank, received, tally)) return;  // without offsets rows cannot be told apart
  const std::vector<oracle::PartShape> shapes = oracle::arrived_shapes(global_, positions_, rank);
  const std::vector<oracle::RowInfo>& rows = positions_.ranks[at(rank)].rows;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row row{rank, static_cast<std::int64_t>(i), &rows[i]};
    if (rows[i].state == oracle::RowState::untouched) continue;
    check_notes(row, received, tally);
    if (row.kept()) check_values(row, received, shapes, tally);
  }
}

bool StepOracle::check_tables(int rank, const DispatchResult& received, Tally& tally) const {
  bool all_right = true;
  auto same = [&](const char* name, const std::vector<std::int32_t>& expected, const std::int32_t* found) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] == found[i]) {
        tally.right(1);
        continue;
      }
      all_right = false;
      tally.fail(1, fmt::format("step {}, rank {}: {}[{}] is {}, must be {}", step_, rank, name, i, found[i],
                                expected[i]));
    }
  };
  const oracle::RankRows& here = positions_.ranks[at(rank)];
  same("counts", here.counts, received.counts);
  same("row_offsets", here.row_offsets, received.row_offsets);
  same("group_expert", here.group_expert, received.group_expert);
  same("total", {here.row_offsets.back()}, received.total);
  return all_right;
}

void StepOracle::check_notes(const Row& row, const DispatchResult& received, Tally& tally) const {
  note(received.source[row.index] == row.from(), row, "the source", tally);
  if (job_.config.layout == Layout::rank_major) return check_slots(row, received, tally);
  const float weight = row.kept() ? weight_of(row.from(), row.from().slot) : 0.0F;
  note(same_bits(received.weight[row.index], weight), row, "the weight", tally);
}

// rank_major: the local expert and weight of every slot, -1 and 0 for experts of other ranks.
void StepOracle::check_slots(const Row& row, const DispatchResult& received, Tally& tally) const {
  const int top_k = job_.config.top_k;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t found = row.index * top_k + slot;
    const oracle::RouteTarget route =
        row.kept() ? positions_.route(row.from().rank, row.from().token, slot) : oracle::RouteTarget{};
    const bool here = route.destination == row.rank;
    note(received.local_ids[found] == (here ? route.local : -1), row, "a local expert", tally);
    note(same_bits(received.weight[found], here ? weight_of(row.from(), slot) : 0.0F), row, "a weight",
         tally);
  }
}

void StepOracle::check_values(const Row& row, const DispatchResult& received,
                              const std::vector<oracle::PartShape>& shapes, Tally& tally) {
  for (std::size_t part = 0; part < shapes.size(); ++part) {
    const oracle::PartShape& shape = shapes[part];
    const std::vector<std::byte> expected =
        encoded(row.from().rank, row.from().token, static_cast<int>(part));
    const auto* found = static_cast<const std::byte*>(received.parts[part].data) + row.index * shape.row_step;
    bool right = true;
    for (std::int64_t e = 0; e < shape.elements; ++e) {
      right = right && std::memcmp(found + e * shape.element_step, &expected[at(e * shape.element_bytes)],
                                   at(shape.element_bytes)) == 0;
    }
    note(right, row, part == 0 ? "a value" : "a scale", tally);
  }
}

void StepOracle::note(bool right, const Row& row, const char* what, Tally& tally) const {
  if (right) return tally.right(1);
  tally.fail(1, fmt::format("step {}, rank {}, row {} (of rank {}, token {}, slot {}): {} differs", step_,
                            row.rank, row.index, row.from().rank, row.from().token, row.from().slot, what));
}

float StepOracle::weight_of(const Source& from, int slot) const {
  return global_.ranks[at(from.rank)].weights[at(std::int64_t{from.token} * job_.config.top_k + slot)];
}

std::vector<std::byte> StepOracle::encoded(int rank, std::int64_t token, int part) {
  make_token(job_, step_, rank, token, one_.ranks[0].parts[0].data());
  return oracle::encoded_part(one_, 0, 0, part, nullptr);
}

std::vector<float> StepOracle::arriving(int rank) {
  const std::int64_t hidden = job_.config.hidden;
  std::vector<float> values(at(job_.tokens() * hidden));
  for (std::int64_t token = 0; token < job_.tokens(); ++token)
    decode(rank, token, &values[at(token * hidden)]);
  return values;
}

void StepOracle::decode(int rank, std::int64_t token, float* values) {
  const std::int64_t hidden = job_.config.hidden;
  const std::vector<std::byte> bytes = encoded(rank, token, 0);
  if (job_.config.format.kind != FormatKind::fp8_e4m3) {
    cpu::kernels().convert_row(values, DType::fp32, bytes.data(), job_.type, hidden, cpu::Store::cached);
    return;
  }
  const std::vector<std::byte> scales = encoded(rank, token, 1);
  for (std::int64_t c = 0; c < hidden; ++c) {
    values[c] = value_of_e4m3(std::to_integer<int>(bytes[at(c)])) *
                scale_of(scales, c / kBlock, job_.config.format.fp8.packed);
  }
}

}  // namespace ferry::app
