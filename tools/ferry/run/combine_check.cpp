#include "tools/ferry/run/combine_check.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "backends/cpu/kernels/kernels.hpp"
#include "exchange/configuration.hpp"
#include "tools/ferry/run/device_context.hpp"

namespace ferry::app {

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
