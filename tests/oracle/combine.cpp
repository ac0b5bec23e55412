#include "oracle/combine.hpp"

#include <cmath>

#include "oracle/numbers.hpp"

namespace ferry::oracle {
namespace {

// One combine seen from one home rank.
struct Home {
  const Config& config;
  const RowPositions& positions;
  const Outcome& outcome;
  int rank;

  std::int64_t hidden() const { return config.hidden; }

  const std::byte* row_at(const RouteTarget& route) const {
    return outcome.ranks[route.destination].rows.data() + route.row * hidden() * bytes_of(outcome.outputs);
  }

  float weight(std::int64_t token, int slot) const {
    if (outcome.topk_weighted) return outcome.ranks[rank].topk_weights[token * positions.top_k + slot];
    const RouteTarget& route = positions.route(rank, token, slot);
    return outcome.weighted ? outcome.ranks[route.destination].weights[route.row] : 1.0f;
  }
};

// An expert's row as it travels: in the wire type.
std::vector<float> wire_row(const Home& home, const RouteTarget& route) {
  const std::byte* row = home.row_at(route);
  std::vector<float> values(home.hidden());
  for (std::int64_t c = 0; c < home.hidden(); ++c) {
    values[c] = rounded(home.config.combine_type,
                        load(home.outcome.outputs, row + c * bytes_of(home.outcome.outputs)));
  }
  return values;
}

void add_weighted(const Home& home, std::int64_t token, int slot, std::vector<float>& sum) {
  const std::vector<float> row = wire_row(home, home.positions.route(home.rank, token, slot));
  const float weight = home.weight(token, slot);
  for (std::size_t c = 0; c < sum.size(); ++c) sum[c] = std::fma(weight, row[c], sum[c]);
}

std::vector<float> exact(const Home& home, std::int64_t token) {
  std::vector<float> sum(home.hidden());
  for (int slot = 0; slot < home.positions.top_k; ++slot) {
    if (home.positions.route(home.rank, token, slot).row >= 0) add_weighted(home, token, slot, sum);
  }
  return sum;
}

// What rank `from` sends home for a token: its rows there, added in slot order. Empty: nothing.
std::vector<float> partial_of(const Home& home, std::int64_t token, int from) {
  std::vector<float> sum;
  for (int slot = 0; slot < home.positions.top_k; ++slot) {
    const RouteTarget& route = home.positions.route(home.rank, token, slot);
    if (route.destination != from || route.row < 0) continue;
    if (home.config.layout == Layout::rank_major)
      return wire_row(home, route);  // the caller has added already
    sum.resize(home.hidden());
    add_weighted(home, token, slot, sum);
  }
  for (float& value : sum) value = rounded(home.config.combine_type, value);
  return sum;
}

std::vector<float> partial(const Home& home, std::int64_t token) {
  std::vector<float> sum(home.hidden());
  for (int from = 0; from < home.positions.size(); ++from) {
    const std::vector<float> part = partial_of(home, token, from);
    for (std::size_t c = 0; c < part.size(); ++c) sum[c] = sum[c] + part[c];
  }
  return sum;
}

std::vector<std::byte> reduced(const Home& home) {
  const std::int64_t tokens = home.positions.tokens(home.rank), size = bytes_of(home.outcome.result);
  std::vector<std::byte> result(tokens * home.hidden() * size);
  for (std::int64_t token = 0; token < tokens; ++token) {
    const bool in_slot_order = home.outcome.reduction == Reduction::exact;
    const std::vector<float> sum = in_slot_order ? exact(home, token) : partial(home, token);
    for (std::int64_t c = 0; c < home.hidden(); ++c) {
      store(home.outcome.result, sum[c], result.data() + (token * home.hidden() + c) * size);
    }
  }
  return result;
}

std::vector<std::byte> unreduced(const Home& home) {
  const std::int64_t tokens = home.positions.tokens(home.rank), top_k = home.positions.top_k;
  const std::int64_t row_bytes = home.hidden() * bytes_of(home.outcome.result);
  std::vector<std::byte> result(tokens * top_k * row_bytes);  // +0 where masked or dropped
  std::vector<std::byte> on_wire(home.hidden() * bytes_of(home.config.combine_type));
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (int slot = 0; slot < top_k; ++slot) {
      const RouteTarget& route = home.positions.route(home.rank, token, slot);
      if (route.row < 0) continue;
      convert(home.outcome.outputs, home.row_at(route), home.config.combine_type, on_wire.data(),
              home.hidden());
      convert(home.config.combine_type, on_wire.data(), home.outcome.result,
              result.data() + (token * top_k + slot) * row_bytes, home.hidden());
    }
  }
  return result;
}

}  // namespace

std::vector<std::byte> combined(const Config& config, const RowPositions& positions, const Outcome& outcome,
                                int rank) {
  const Home home{config, positions, outcome, rank};
  return outcome.reduction == Reduction::unreduced ? unreduced(home) : reduced(home);
}

std::vector<float> values_home(const RowPositions& positions, const Outcome& outcome, int rank) {
  std::vector<float> values;
  for (const RouteTarget& route : positions.routes[rank]) {
    values.push_back(route.row >= 0 ? outcome.ranks[route.destination].row_values[route.row] : 0.0f);
  }
  return values;
}

std::vector<float> values_at_rows(const RowPositions& positions,
                                  const std::vector<std::vector<float>>& values, int rank) {
  std::vector<float> at_rows;
  for (const RowInfo& row : positions.ranks[rank].rows) {
    const bool kept = row.state == RowState::kept;
    const std::int64_t index = std::int64_t{row.source.token} * positions.top_k + row.source.slot;
    at_rows.push_back(kept ? values[row.source.rank][index] : 0.0f);
  }
  return at_rows;
}

}  // namespace ferry::oracle
