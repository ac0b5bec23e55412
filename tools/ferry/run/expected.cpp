#include "tools/ferry/run/expected.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "exchange/configuration.hpp"
#include "format/encoding.hpp"
#include "oracle/encode.hpp"
#include "tools/ferry/run/device_context.hpp"

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

namespace {

// [ranks][ranks], from and to.
class Matrix {
 public:
  Matrix(std::span<std::int64_t> messages, int ranks) : messages_(messages), ranks_(ranks) {}
  std::int64_t& operator()(int from, int to) const {
    return messages_[static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) +
                     static_cast<std::size_t>(to)];
  }

 private:
  std::span<std::int64_t> messages_;
  int ranks_;
};

// Routes of one token to each rank, [ranks].
using RoutesToRank = std::vector<int>;

// Rows that a rank returns for a token.
int rows_of(const Config& config, int routes) {
  if (config.transfer == Transfer::gather) return 1;
  return config.reduction == Reduction::partial ? (routes > 0 ? 1 : 0) : routes;
}

// The messages between `source` and one node that has routes of the token. `entries`: ranks that messages to
// a relay are for.
void add_node(const Config& config, const Topology& topology, int source, int node,
              const RoutesToRank& routes, const Matrix& dispatch, const Matrix& entries,
              const Matrix& combine) {
  const bool relayed = config.hops == Hops::two && node != topology.node_of(source);
  const int relay = relayed ? topology.relay_of(source, node) : source;
  int rows = 0;
  for (const int rank : topology.ranks_of(node)) {
    const int here = rows_of(config, routes[static_cast<std::size_t>(rank)]);
    rows += here;
    if (here > 0 && relayed) entries(source, relay) += 1;
    if (here == 0 || (relayed && rank == relay)) continue;
    dispatch(relay, rank) += 1;
    combine(rank, relay) += here;
  }
  if (!relayed || rows == 0) return;
  dispatch(source, relay) += 1;
  combine(relay, source) += relays_add(config) ? 1 : rows;
}

}  // namespace

bool relays_add(const Config& config) {
  return config.hops == Hops::two && config.reduction == Reduction::partial &&
         config.reduction_level == ReductionLevel::node;
}

void add_planned_messages(const RunSpec& spec, const Config& config, const Topology& topology, int step,
                          const SharedResults& results) {
  const int ranks = topology.ranks();
  const Matrix sent(results.dispatch_messages(), ranks), entries(results.dispatch_entries(), ranks),
      returned(results.combine_messages(), ranks);
  for (int source = 0; source < ranks; ++source) {
    const Routes routes = make_routes(spec, step, source);
    for (std::size_t token = 0; token < routes.ids.size(); token += static_cast<std::size_t>(config.top_k)) {
      RoutesToRank to_rank(static_cast<std::size_t>(ranks), 0);
      for (std::size_t slot = 0; slot < static_cast<std::size_t>(config.top_k); ++slot) {
        const int expert = routes.ids[token + slot];
        if (expert < 0) continue;
        const int rank = config.placement.location(expert).rank;
        if (config.input == Input::own || rank == source) ++to_rank[static_cast<std::size_t>(rank)];
      }
      for (int node = 0; node < topology.nodes(); ++node)
        add_node(config, topology, source, node, to_rank, sent, entries, returned);
    }
  }
}

namespace {

using Row = std::vector<float>;

void store(DType type, const Row& values, std::byte* to) {
  cpu::kernels().convert_row(to, type, values.data(), DType::fp32, static_cast<std::int64_t>(values.size()),
                             cpu::Store::cached);
}

void load(DType type, const std::byte* from, Row& values) {
  cpu::kernels().convert_row(values.data(), DType::fp32, from, type, static_cast<std::int64_t>(values.size()),
                             cpu::Store::cached);
}

void round(DType type, Row& values) {
  if (type == DType::fp32) return;
  std::vector<std::byte> bytes(values.size() * at(bytes_of(type)));
  store(type, values, bytes.data());
  load(type, bytes.data(), values);
}

// sum = fma(weight, v, sum), column by column.
void add(float weight, const Row& v, Row& sum) {
  for (std::size_t c = 0; c < sum.size(); ++c) sum[c] = std::fma(weight, v[c], sum[c]);
}

// A token multiplied by the factor of an expert, rounded to RunSpec::type.
Row product(const RunSpec& spec, std::span<const float> x, int expert) {
  Row v(x.begin(), x.end());
  for (float& value : v) value *= factor_of(expert);
  round(spec.type, v);
  return v;
}

struct Token {
  std::span<const float> x;
  const std::int32_t* ids;  // [K]
  const float* weights;     // [K]
};

Row sum_exact(const RunSpec& spec, const Token& token) {
  Row sum(token.x.size());
  for (int slot = 0; slot < spec.config.top_k; ++slot) {
    if (token.ids[slot] >= 0) add(token.weights[slot], product(spec, token.x, token.ids[slot]), sum);
  }
  return sum;
}

// Shared experts come after all others, with weight 1.
void add_shared(const RunSpec& spec, const Token& token, Row& sum) {
  for (int expert = spec.config.experts; expert < spec.all_experts(); ++expert)
    add(1, product(spec, token.x, expert), sum);
}

// The sum of a rank's experts for the token, rounded to RunSpec::type; 0 without any.
Row sum_on_rank(const RunSpec& spec, const Token& token, int rank) {
  Row sum(token.x.size());
  for (int slot = 0; slot < spec.config.top_k; ++slot) {
    const int expert = token.ids[slot];
    if (expert < 0 || spec.config.placement.location(expert).rank != rank) continue;
    add(token.weights[slot], product(spec, token.x, expert), sum);
  }
  round(spec.type, sum);
  return sum;
}

// The sums of these ranks, added in their order. Adding the 0 of a rank without experts changes nothing.
Row sum_of_ranks(const RunSpec& spec, const Token& token, const std::vector<int>& ranks) {
  Row sum(token.x.size());
  for (const int rank : ranks) add(1, sum_on_rank(spec, token, rank), sum);
  return sum;
}

Row sum_partial(const RunSpec& spec, const Topology& topology, const Token& token) {
  if (chosen_level(spec.config, topology) == ReductionLevel::rank) {
    std::vector<int> all(at(topology.ranks()));
    std::iota(all.begin(), all.end(), 0);
    return sum_of_ranks(spec, token, all);
  }
  Row sum(token.x.size());
  for (int node = 0; node < topology.nodes(); ++node) {
    Row part = sum_of_ranks(spec, token, topology.ranks_of(node));
    round(spec.type, part);
    add(1, part, sum);
  }
  return sum;
}

void write_unreduced(const RunSpec& spec, const Token& token, std::byte* to) {
  for (int slot = 0; slot < spec.config.top_k; ++slot) {
    const Row zeros(token.x.size());
    store(spec.type, token.ids[slot] < 0 ? zeros : product(spec, token.x, token.ids[slot]),
          to + slot * spec.row_bytes());
  }
}

// The token's row of combine's result. Unreduced rows are summed with their weights.
Row result_of(const RunSpec& spec, const float* weights, const std::byte* found) {
  Row row(at(spec.config.hidden));
  if (spec.config.reduction != Reduction::unreduced) {
    load(spec.type, found, row);
    return row;
  }
  Row sum(row.size());
  for (int slot = 0; slot < spec.config.top_k; ++slot) {
    load(spec.type, found + slot * spec.row_bytes(), row);
    add(weights[slot], row, sum);
  }
  return sum;
}

double relative_error(const Row& found, const float* dense) {
  double difference = 0, size = 0;
  for (std::size_t c = 0; c < found.size(); ++c) {
    const double d = double{found[c]} - double{dense[c]};
    difference += d * d;
    size += double{dense[c]} * double{dense[c]};
  }
  if (size == 0) return difference == 0 ? 0 : INFINITY;
  return std::sqrt(difference / size);
}

}  // namespace

std::vector<std::byte> expected_products(const RunSpec& spec, const Topology& topology, const Routes& routes,
                                         std::span<const float> x) {
  const std::int64_t top_k = spec.config.top_k, hidden = spec.config.hidden;
  std::vector<std::byte> expected(at(spec.result_bytes()));
  const std::int64_t stride = spec.result_bytes() / spec.tokens();
  for (std::int64_t t = 0; t < spec.tokens(); ++t) {
    const Token token{x.subspan(at(t * hidden), at(hidden)), &routes.ids[at(t * top_k)],
                      &routes.weights[at(t * top_k)]};
    std::byte* to = expected.data() + t * stride;
    if (spec.config.reduction == Reduction::unreduced) {
      write_unreduced(spec, token, to);
    } else {
      Row sum = spec.config.reduction == Reduction::exact ? sum_exact(spec, token)
                                                          : sum_partial(spec, topology, token);
      add_shared(spec, token, sum);
      store(spec.type, sum, to);
    }
  }
  return expected;
}

void check_rows(const RunSpec& spec, int step, int rank, std::span<const std::byte> expected,
                std::span<const std::byte> found, CheckCounter& counter) {
  const auto size = at(bytes_of(spec.type));
  const auto row = at(spec.row_bytes());
  for (std::size_t begin = 0; begin < expected.size(); begin += row) {
    if (std::memcmp(&expected[begin], &found[begin], row) == 0) {
      counter.pass(spec.config.hidden);
      continue;
    }
    for (std::size_t i = begin; i < begin + row; i += size) {
      if (std::memcmp(&expected[i], &found[i], size) == 0) {
        counter.pass(1);
      } else {
        counter.fail(1, fmt::format("step {}, rank {}, row {}, column {}", step, rank, begin / row,
                                    (i - begin) / size));
      }
    }
  }
}

std::vector<float> dense_swiglu(const RunSpec& spec, const Routes& routes, std::span<const float> x) {
  const std::int64_t hidden = spec.config.hidden, top_k = spec.config.top_k;
  struct Use {
    std::int64_t token;
    float weight;
  };
  std::vector<std::vector<Use>> uses(at(spec.all_experts()));  // of each expert
  for (std::int64_t route = 0; route < spec.tokens() * top_k; ++route) {
    if (routes.ids[at(route)] >= 0)
      uses[at(routes.ids[at(route)])].push_back({route / top_k, routes.weights[at(route)]});
  }
  for (int shared = spec.config.experts; shared < spec.all_experts(); ++shared) {
    for (std::int64_t token = 0; token < spec.tokens(); ++token) uses[at(shared)].push_back({token, 1});
  }
  std::vector<float> dense(x.size()), in, out;
  Swiglu function(spec.weights);
  for (int expert = 0; expert < spec.all_experts(); ++expert) {
    const std::vector<Use>& own_uses = uses[at(expert)];
    in.clear();
    for (const Use& use : own_uses) {
      const auto token = x.subspan(at(use.token * hidden), at(hidden));
      in.insert(in.end(), token.begin(), token.end());
    }
    out.resize(in.size());
    function.run(expert, in.data(), static_cast<std::int64_t>(own_uses.size()), out.data());
    for (std::size_t i = 0; i < own_uses.size(); ++i) {
      float* sum = &dense[at(own_uses[i].token * hidden)];
      const float* v = &out[i * at(hidden)];
      for (std::int64_t c = 0; c < hidden; ++c) sum[c] += own_uses[i].weight * v[c];
    }
  }
  return dense;
}

void check_dense(const RunSpec& spec, int step, int rank, const Routes& routes, std::span<const float> dense,
                 std::span<const std::byte> found, CheckCounter& counter) {
  const std::int64_t stride = spec.result_bytes() / spec.tokens();
  for (std::int64_t token = 0; token < spec.tokens(); ++token) {
    const Row row =
        result_of(spec, &routes.weights[at(token * spec.config.top_k)], found.data() + token * stride);
    const double error = relative_error(row, &dense[at(token * spec.config.hidden)]);
    counter.max_error = std::max(counter.max_error, std::isfinite(error) ? error : 1e300);
    if (error <= kTolerance) {
      counter.pass(1);
    } else {
      counter.fail(
          1, fmt::format("step {}, rank {}, token {}: relative error {:.3e}", step, rank, token, error));
    }
  }
}

}  // namespace ferry::app
