#include "oracle/combine.hpp"

#include <algorithm>
#include <cmath>

#include "oracle/numbers.hpp"

namespace ferry::oracle {
namespace {

// One combine, from the point of view of the rank whose tokens are combined.
struct CombineView {
  const Config& config;
  const RowPositions& positions;
  const ExpertOutputs& inputs;
  const Topology& topology;
  int rank;  // the source rank of the tokens

  std::int64_t hidden() const { return config.hidden; }

  const std::byte* row_on(int expert_rank, std::int64_t row) const {
    return inputs.ranks[expert_rank].rows.data() + row * hidden() * bytes_of(inputs.outputs);
  }
  const std::byte* row_of(const RouteTarget& route) const { return row_on(route.destination, route.row); }

  float weight(std::int64_t token, int slot) const {
    if (inputs.topk_weighted) return inputs.ranks[rank].topk_weights[token * positions.top_k + slot];
    const RouteTarget& route = positions.route(rank, token, slot);
    return inputs.weighted ? inputs.ranks[route.destination].weights[route.row] : 1.0f;
  }
};

// An expert's row, rounded to the combine type.
std::vector<float> rounded_row(const CombineView& view, const std::byte* row) {
  std::vector<float> values(view.hidden());
  for (std::int64_t c = 0; c < view.hidden(); ++c) {
    values[c] =
        rounded(view.config.combine_type, load(view.inputs.outputs, row + c * bytes_of(view.inputs.outputs)));
  }
  return values;
}

void add_weighted(const CombineView& view, std::int64_t token, int slot, std::vector<float>& sum) {
  const std::vector<float> row = rounded_row(view, view.row_of(view.positions.route(view.rank, token, slot)));
  const float weight = view.weight(token, slot);
  for (std::size_t c = 0; c < sum.size(); ++c) sum[c] = std::fma(weight, row[c], sum[c]);
}

// `exact`: adds the token's rows in slot order.
std::vector<float> exact_sum(const CombineView& view, std::int64_t token) {
  std::vector<float> sum(view.hidden());
  for (int slot = 0; slot < view.positions.top_k; ++slot) {
    if (view.positions.route(view.rank, token, slot).row >= 0) add_weighted(view, token, slot, sum);
  }
  return sum;
}

// The sum that rank `from` sends for a token: its rows on that rank, added in slot order. Empty: it sends
// none.
std::vector<float> sum_on_rank(const CombineView& view, std::int64_t token, int from) {
  std::vector<float> sum;
  for (int slot = 0; slot < view.positions.top_k; ++slot) {
    const RouteTarget& route = view.positions.route(view.rank, token, slot);
    if (route.destination != from || route.row < 0) continue;
    if (view.config.layout == Layout::rank_major)
      return rounded_row(view, view.row_of(route));  // the caller has already summed over its experts
    sum.resize(view.hidden());
    add_weighted(view, token, slot, sum);
  }
  for (float& value : sum) value = rounded(view.config.combine_type, value);
  return sum;
}

// sum += part, column by column. An empty part adds nothing.
void add(const std::vector<float>& part, std::vector<float>& sum) {
  sum.resize(std::max(sum.size(), part.size()));
  for (std::size_t c = 0; c < part.size(); ++c) sum[c] = sum[c] + part[c];
}

// The sum of a node's ranks for a token, added in rank order. Empty: they send none.
std::vector<float> sum_of_node(const CombineView& view, std::int64_t token, int node) {
  std::vector<float> sum;
  for (const int from : view.topology.ranks_of(node)) add(sum_on_rank(view, token, from), sum);
  for (float& value : sum) value = rounded(view.config.combine_type, value);
  return sum;
}

// `partial`: adds the sums of all ranks in rank order, or of all nodes in node order.
std::vector<float> partial_sum(const CombineView& view, std::int64_t token) {
  const ReductionLevel level = view.config.reduction_level;
  std::vector<float> sum(view.hidden());
  const bool chooses_node = view.topology.nodes() > 1 && view.config.transfer == Transfer::routed;
  if (level == ReductionLevel::node || (level == ReductionLevel::automatic && chooses_node)) {
    for (int node = 0; node < view.topology.nodes(); ++node) add(sum_of_node(view, token, node), sum);
  } else {
    for (int from = 0; from < view.positions.size(); ++from) add(sum_on_rank(view, token, from), sum);
  }
  return sum;
}

// Adds the token's rows of the shared experts.
void add_shared(const CombineView& view, std::int64_t token, std::vector<float>& sum) {
  for (const std::vector<std::int64_t>& rows : view.positions.shared_rows[view.rank]) {
    if (rows[token] < 0) continue;
    const std::vector<float> row = rounded_row(view, view.row_on(view.rank, rows[token]));
    for (std::size_t c = 0; c < sum.size(); ++c) sum[c] = std::fma(1.0f, row[c], sum[c]);
  }
}

// Rounds an expert's row to the combine type, and converts it to the result's.
void write_row(const CombineView& view, const std::byte* row, std::byte* out) {
  std::vector<std::byte> as_combine_type(view.hidden() * bytes_of(view.config.combine_type));
  convert(view.inputs.outputs, row, view.config.combine_type, as_combine_type.data(), view.hidden());
  convert(view.config.combine_type, as_combine_type.data(), view.inputs.result, out, view.hidden());
}

std::vector<std::byte> reduced(const CombineView& view) {
  const std::int64_t tokens = view.positions.tokens(view.rank), size = bytes_of(view.inputs.result);
  std::vector<std::byte> result(tokens * view.hidden() * size);
  for (std::int64_t token = 0; token < tokens; ++token) {
    const bool exact = view.inputs.reduction == Reduction::exact;
    std::vector<float> sum = exact ? exact_sum(view, token) : partial_sum(view, token);
    if (!view.inputs.shared_outputs) add_shared(view, token, sum);
    for (std::int64_t c = 0; c < view.hidden(); ++c) {
      store(view.inputs.result, sum[c], result.data() + (token * view.hidden() + c) * size);
    }
  }
  return result;
}

std::vector<std::byte> unreduced(const CombineView& view) {
  const std::int64_t tokens = view.positions.tokens(view.rank), top_k = view.positions.top_k;
  const std::int64_t row_bytes = view.hidden() * bytes_of(view.inputs.result);
  std::vector<std::byte> result(tokens * top_k * row_bytes);  // +0 where masked or dropped
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (int slot = 0; slot < top_k; ++slot) {
      const RouteTarget& route = view.positions.route(view.rank, token, slot);
      if (route.row >= 0)
        write_row(view, view.row_of(route), result.data() + (token * top_k + slot) * row_bytes);
    }
  }
  return result;
}

}  // namespace

std::vector<std::byte> with_epilogue(DType type, std::vector<std::byte> result, float scale,
                                     const std::byte* residual) {
  const std::size_t size = bytes_of(type);
  for (std::size_t at = 0; at < result.size(); at += size) {
    const float added = residual != nullptr ? load(type, residual + at) : -0.0f;
    store(type, std::fma(scale, load(type, result.data() + at), added), result.data() + at);
  }
  return result;
}

std::vector<std::byte> combined(const Config& config, const RowPositions& positions,
                                const ExpertOutputs& inputs, const Topology& topology, int rank) {
  const CombineView view{config, positions, inputs, topology, rank};
  return inputs.reduction == Reduction::unreduced ? unreduced(view) : reduced(view);
}

std::vector<std::byte> returned_shared_rows(const Config& config, const RowPositions& positions,
                                            const ExpertOutputs& inputs, int rank) {
  const Topology one_node = Topology::blocks(positions.size(), 1);
  const CombineView view{config, positions, inputs, one_node, rank};
  const std::int64_t row_bytes = view.hidden() * bytes_of(inputs.result);
  std::vector<std::byte> all;
  for (const std::vector<std::int64_t>& rows : positions.shared_rows[rank]) {
    for (const std::int64_t row : rows) {
      all.resize(all.size() + row_bytes);  // +0 if it was dropped
      if (row >= 0) write_row(view, view.row_on(rank, row), all.data() + all.size() - row_bytes);
    }
  }
  return all;
}

std::vector<float> returned_row_values(const RowPositions& positions, const ExpertOutputs& inputs, int rank) {
  std::vector<float> values;
  for (const RouteTarget& route : positions.routes[rank]) {
    values.push_back(route.row >= 0 ? inputs.ranks[route.destination].row_values[route.row] : 0.0f);
  }
  return values;
}

std::vector<float> values_at_rows(const RowPositions& positions,
                                  const std::vector<std::vector<float>>& values, int rank) {
  std::vector<float> at_rows;
  for (const RowInfo& row : positions.ranks[rank].rows) {
    const bool kept = row.state == RowState::kept && row.source.slot < positions.top_k;
    const std::int64_t index = std::int64_t{row.source.token} * positions.top_k + row.source.slot;
    at_rows.push_back(kept ? values[row.source.rank][index] : 0.0f);
  }
  return at_rows;
}

}  // namespace ferry::oracle
