#include "tools/ferry/run/dispatch_values.hpp"

#include <fmt/core.h>

#include <cmath>
#include <cstring>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/encoding.hpp"
#include "oracle/encode.hpp"

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

oracle::GlobalInputs empty_inputs(const RunSpec& spec) {
  oracle::GlobalInputs global;
  global.config = spec.config;
  global.format = spec.config.format;
  global.type = spec.type;
  global.weighted = true;
  global.global_scale = spec.global_scale();
  return global;
}

void decode(const RunSpec& spec, const DispatchCheck::Parts& token, float* values) {
  const std::int64_t hidden = spec.config.hidden;
  const Encoding encoding = encoding_of(spec.config.format);
  if (!encoding.quantises()) {
    cpu::kernels().convert_row(values, DType::fp32, token[0].data(), spec.type, hidden, cpu::Store::cached);
    return;
  }
  float row_scale = spec.global_scale();
  if (encoding.row_scale) std::memcpy(&row_scale, token[2].data(), sizeof row_scale);
  for (std::int64_t c = 0; c < hidden; ++c) {
    const float element = encoding.element == ElementType::e2m1
                              ? value_of_e2m1(token[0], c)
                              : value_of_e4m3(std::to_integer<int>(token[0][at(c)]));
    values[c] = element * (scale_of(encoding, token[1], c) * row_scale);
  }
}

}  // namespace

DispatchCheck dispatch_check(const RunSpec& spec, int step) {
  oracle::GlobalInputs global = empty_inputs(spec);
  for (int rank = 0; rank < spec.options.ranks; ++rank) {
    Routes routes = make_routes(spec, step, rank);
    oracle::RankInputs& inputs = global.ranks.emplace_back();
    inputs.tokens = spec.tokens();
    inputs.ids.assign(routes.ids.begin(), routes.ids.end());
    inputs.weights = std::move(routes.weights);
  }
  return {std::move(global), fmt::format("step {}", step)};
}

DispatchCheck::TokenParts token_parts(const RunSpec& spec, int step) {
  oracle::GlobalInputs one = empty_inputs(spec);  // one token of one rank, written anew for each
  one.ranks.resize(1);
  one.ranks[0].tokens = 1;
  one.ranks[0].parts[0].resize(at(spec.row_bytes()));
  const auto count = oracle::part_shapes(spec.config.format, spec.config.hidden, 1, 0).size();
  return [&spec, step, count, one = std::move(one)](int rank, std::int64_t token) mutable {
    make_token(spec, step, rank, token, one.ranks[0].parts[0].data());
    DispatchCheck::Parts parts;
    for (std::size_t part = 0; part < count; ++part)
      parts[part] = oracle::encoded_part(one, 0, 0, static_cast<int>(part), nullptr);
    return parts;
  };
}

std::vector<float> expected_values(const RunSpec& spec, int step, int rank) {
  const std::int64_t hidden = spec.config.hidden;
  const DispatchCheck::TokenParts parts = token_parts(spec, step);
  std::vector<float> values(at(spec.tokens() * hidden));
  for (std::int64_t token = 0; token < spec.tokens(); ++token)
    decode(spec, parts(rank, token), &values[at(token * hidden)]);
  return values;
}

}  // namespace ferry::app
