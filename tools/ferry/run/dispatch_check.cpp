#include "tools/ferry/run/dispatch_check.hpp"

#include <fmt/core.h>

#include <cmath>
#include <cstring>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/encoding.hpp"
#include "oracle/dispatch.hpp"

namespace ferry::app {

namespace {

// What a format consists of is asked of its table; elements and scales are decoded again here, so that the
// check does not depend on the code it checks.

// Decodes e4m3: sign, four bits of exponent (bias 7), three of fraction.
float value_of_e4m3(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                        : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Decodes e2m1, whose even columns are in the low bits of a byte.
float value_of_e2m1(const std::vector<std::byte>& bytes, std::int64_t column) {
  constexpr float kMagnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  const int code = std::to_integer<int>(bytes[at(column / 2)]) >> (column % 2 == 0 ? 0 : 4);
  return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

float scale_of(const Encoding& encoding, const std::vector<std::byte>& scales, std::int64_t column) {
  const std::int64_t block = column / encoding.block;
  float scale = 0;
  switch (encoding.scale_type) {
    case ScaleType::e4m3:
      return value_of_e4m3(std::to_integer<int>(scales[at(block)]));
    case ScaleType::exponent:
      return std::ldexp(1.0F, std::to_integer<int>(scales[at(block)]) - 127);
    case ScaleType::fp32:
      std::memcpy(&scale, &scales[at(block * 4)], sizeof scale);
  }
  return scale;
}

bool same_bits(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

oracle::GlobalInputs empty_inputs(const RunSpec& spec) {
  oracle::GlobalInputs global;
  global.config = spec.config;
  global.format = spec.config.format;
  global.type = spec.type;
  global.weighted = true;
  global.global_scale = spec.global_scale();
  return global;
}

}  // namespace

struct DispatchCheck::Row {
  int rank;
  std::int64_t index;
  const oracle::RowInfo* info;

  bool kept() const { return info->state == oracle::RowState::kept; }
  const Source& from() const { return info->source; }
};

DispatchCheck::DispatchCheck(const RunSpec& spec, int step)
    : spec_(spec), step_(step), global_(empty_inputs(spec)), single_(empty_inputs(spec)) {
  for (int rank = 0; rank < spec.options.ranks; ++rank) {
    Routes routes = make_routes(spec, step, rank);
    oracle::RankInputs& inputs = global_.ranks.emplace_back();
    inputs.tokens = spec.tokens();
    inputs.ids.assign(routes.ids.begin(), routes.ids.end());
    inputs.weights = std::move(routes.weights);
  }
  positions_ = oracle::find_row_positions(global_);
  single_.ranks.resize(1);
  single_.ranks[0].tokens = 1;
  single_.ranks[0].parts[0].resize(at(spec.row_bytes()));
}

void DispatchCheck::run(int rank, const DispatchResult& received, CheckCounter& counter) {
  if (!check_tables(rank, received, counter)) return;  // without offsets the rows cannot be located
  const std::vector<oracle::PartShape> shapes = oracle::received_shapes(global_, positions_, rank);
  const std::vector<oracle::RowInfo>& rows = positions_.ranks[at(rank)].rows;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row row{rank, static_cast<std::int64_t>(i), &rows[i]};
    if (rows[i].state == oracle::RowState::untouched) continue;
    check_metadata(row, received, counter);
    if (row.kept()) check_values(row, received, shapes, counter);
  }
}

bool DispatchCheck::check_tables(int rank, const DispatchResult& received, CheckCounter& counter) const {
  bool all_equal = true;
  auto same = [&](const char* name, const std::vector<std::int32_t>& expected, const std::int32_t* found) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] == found[i]) {
        counter.pass(1);
        continue;
      }
      all_equal = false;
      counter.fail(1, fmt::format("step {}, rank {}: {}[{}] is {}, expected {}", step_, rank, name, i,
                                  found[i], expected[i]));
    }
  };
  const oracle::RankRows& here = positions_.ranks[at(rank)];
  same("counts", here.counts, received.counts);
  same("row_offsets", here.row_offsets, received.row_offsets);
  same("group_expert", here.group_expert, received.group_expert);
  same("total", {here.row_offsets.back()}, received.total);
  return all_equal;
}

void DispatchCheck::check_metadata(const Row& row, const DispatchResult& received,
                                   CheckCounter& counter) const {
  record(received.source[row.index] == row.from(), row, "the source", counter);
  if (spec_.config.layout == Layout::rank_major) return check_slots(row, received, counter);
  const float weight = row.kept() ? weight_of(row.from(), row.from().slot) : 0.0F;
  record(same_bits(received.weight[row.index], weight), row, "the weight", counter);
}

// rank_major: local expert and weight of every slot; -1 and 0 for experts of other ranks.
void DispatchCheck::check_slots(const Row& row, const DispatchResult& received, CheckCounter& counter) const {
  const int top_k = spec_.config.top_k;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t found = row.index * top_k + slot;
    const oracle::RouteTarget route =
        row.kept() ? positions_.route(row.from().rank, row.from().token, slot) : oracle::RouteTarget{};
    const bool here = route.destination == row.rank;
    record(received.local_ids[found] == (here ? route.local : -1), row, "a local expert", counter);
    record(same_bits(received.weight[found], here ? weight_of(row.from(), slot) : 0.0F), row, "a weight",
           counter);
  }
}

// The row of the scales of a kept row in the tiles of all groups.
std::int64_t DispatchCheck::tile_row(const Row& row) const {
  const oracle::RankRows& here = positions_.ranks[at(row.rank)];
  const auto group = at(row.info->group);
  const std::int64_t first = oracle::group_tiles(global_, positions_, row.rank)[group];
  return 128 * first + row.index - here.row_offsets[group];
}

void DispatchCheck::check_values(const Row& row, const DispatchResult& received,
                                 const std::vector<oracle::PartShape>& shapes, CheckCounter& counter) {
  for (std::size_t part = 0; part < shapes.size(); ++part) {
    const oracle::PartShape& shape = shapes[part];
    const std::vector<std::byte> expected =
        encoded(row.from().rank, row.from().token, static_cast<int>(part));
    const auto* found = static_cast<const std::byte*>(received.parts[part].data);
    const std::int64_t place = shape.tile_blocks > 0 ? tile_row(row) : row.index;
    bool equal = true;
    for (std::int64_t e = 0; e < shape.elements; ++e) {
      equal = equal && std::memcmp(found + shape.offset(place, e), &expected[at(e * shape.element_bytes)],
                                   at(shape.element_bytes)) == 0;
    }
    record(equal, row, part == 0 ? "a value" : "a scale", counter);
  }
}

void DispatchCheck::record(bool equal, const Row& row, const char* what, CheckCounter& counter) const {
  if (equal) return counter.pass(1);
  counter.fail(1, fmt::format("step {}, rank {}, row {} (from rank {}, token {}, slot {}): {} differs", step_,
                              row.rank, row.index, row.from().rank, row.from().token, row.from().slot, what));
}

// Rows of shared experts have weight 1.
float DispatchCheck::weight_of(const Source& from, int slot) const {
  if (slot >= spec_.config.top_k) return 1;
  return global_.ranks[at(from.rank)].weights[at(std::int64_t{from.token} * spec_.config.top_k + slot)];
}

std::vector<std::byte> DispatchCheck::encoded(int rank, std::int64_t token, int part) {
  make_token(spec_, step_, rank, token, single_.ranks[0].parts[0].data());
  return oracle::encoded_part(single_, 0, 0, part, nullptr);
}

std::vector<float> DispatchCheck::expected_values(int rank) {
  const std::int64_t hidden = spec_.config.hidden;
  std::vector<float> values(at(spec_.tokens() * hidden));
  for (std::int64_t token = 0; token < spec_.tokens(); ++token)
    decode(rank, token, &values[at(token * hidden)]);
  return values;
}

void DispatchCheck::decode(int rank, std::int64_t token, float* values) {
  const std::int64_t hidden = spec_.config.hidden;
  const std::vector<std::byte> bytes = encoded(rank, token, 0);
  const Encoding encoding = encoding_of(spec_.config.format);
  if (!encoding.quantises()) {
    cpu::kernels().convert_row(values, DType::fp32, bytes.data(), spec_.type, hidden, cpu::Store::cached);
    return;
  }
  const std::vector<std::byte> scales = encoded(rank, token, 1);
  float row_scale = spec_.global_scale();
  if (encoding.row_scale) std::memcpy(&row_scale, encoded(rank, token, 2).data(), sizeof row_scale);
  for (std::int64_t c = 0; c < hidden; ++c) {
    const float element = encoding.element == ElementType::e2m1
                              ? value_of_e2m1(bytes, c)
                              : value_of_e4m3(std::to_integer<int>(bytes[at(c)]));
    values[c] = element * (scale_of(encoding, scales, c) * row_scale);
  }
}

}  // namespace ferry::app
