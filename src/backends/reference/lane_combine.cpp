// Combine of the reference backend: every rank publishes its rows in the combine type; each source rank reads
// the rows of its routes.
#include <algorithm>
#include <cstring>

#include "backends/reference/lane.hpp"
#include "exchange/call_options.hpp"
#include "exchange/configuration.hpp"
#include "group/fault_points.hpp"
#include "layout/row_of_peer.hpp"
#include "oracle/numbers.hpp"

namespace ferry::reference {

void Lane::combine_send(const CombineCall& call) {
  combine_ = call;
  CallOptions options = options_of(call);
  add_plan(call.plan, &options);
  channel_.begin(Operation::combine, options);
  fault_point(FaultPoint::combine_begin, context_.me());
  const std::int64_t total = call.plan.total(), hidden = context_.config.hidden;
  const std::int64_t row_bytes = hidden * bytes_of(call.outputs.type),
                     combine_row_bytes = hidden * bytes_of(context_.config.combine_type);
  const std::int64_t stride = call.outputs.stride > 0 ? call.outputs.stride : row_bytes;
  const auto* rows = static_cast<const std::byte*>(call.outputs.data);
  std::byte* staging = combine_staging(context_.me());
  auto* weights = reinterpret_cast<float*>(staging + context_.staging.max_rows * combine_row_bytes);
  float* values = weights + context_.staging.max_rows;
  auto* sources = reinterpret_cast<Source*>(values + context_.staging.max_rows);
  const std::span<const Source> plan_sources = call.plan.sources();
  const std::int64_t end = leaves_out_rows_ ? stored_rows(call.plan) : total;
  for (std::int64_t row = 0; row < end; ++row) {
    if (rows != nullptr) {
      oracle::convert(call.outputs.type, rows + row * stride, context_.config.combine_type,
                      staging + row * combine_row_bytes, hidden);
    }
    weights[row] = call.row_weights != nullptr ? call.row_weights[row] : 1.0f;
    values[row] = call.row_values != nullptr ? call.row_values[row] : 0.0f;
    sources[row] = plan_sources[row];
  }
  const bool has_rows = total > 0, relevant = has_rows || call.plan.tokens() > 0;
  write_summary(
      {.count = total,
       .rows_end = end,
       .weights_given = CallSummary::given(call.row_weights, has_rows),
       .rows_given = CallSummary::given(has_rows ? call.outputs.data : call.result.data, relevant),
       .values_given = CallSummary::given(has_rows ? call.row_values : call.route_values, relevant)});
  fault_point(FaultPoint::combine_rows_sent, context_.me());
  post_all();
  fault_point(FaultPoint::combine_posted, context_.me());
}

// Number of rows up to the last one that the plan has an entry for: of a message that has come here, or of a
// shared expert.
std::int64_t Lane::stored_rows(const Plan& plan) const {
  const Config& config = context_.config;
  const PlanView view = view_plan(plan.storage(), plan_shape(config));
  std::int64_t end = 0;
  for (int source = 0; source < context_.ranks(); ++source) {
    const std::int64_t messages = view.tokens_between[source * context_.ranks() + context_.me()];
    const std::int32_t* rows =
        view.received_rows_of_message + std::int64_t{source} * config.max_tokens * config.top_k;
    for (std::int64_t i = 0; i < std::clamp<std::int64_t>(messages, 0, config.max_tokens) * config.top_k; ++i)
      end = std::max(end, rows[i] + std::int64_t{1});
  }
  for (std::int64_t row = end; row < plan.total(); ++row) {
    if (view.sources[row].slot >= config.top_k) end = row + 1;
  }
  return std::min(end, plan.total());
}

// The row of `rank` that has this source; -1: none.
std::int64_t Lane::row_of_source(int rank, const Source& source) const {
  const std::int64_t row_bytes = context_.config.hidden * bytes_of(context_.config.combine_type),
                     beside_row = 2 * sizeof(float);
  const auto* sources = reinterpret_cast<const Source*>(combine_staging(rank) +
                                                        context_.staging.max_rows * (row_bytes + beside_row));
  const std::int64_t end = summary_of(rank).rows_end;
  const Source* const found = std::find(sources, sources + end, source);
  return found == sources + end ? -1 : found - sources;
}

// The row positions that a combine needs: those of this rank's own tokens. Skips invalid entries and counts
// them as bad.
oracle::RowPositions Lane::positions_of(const Plan& plan) {
  const PlanView view = view_plan(plan.storage(), plan_shape(context_.config));
  oracle::RowPositions positions;
  positions.top_k = context_.config.top_k;
  positions.ranks.resize(context_.ranks());
  positions.routes.resize(context_.ranks());
  positions.shared_rows.resize(context_.ranks());
  std::vector<oracle::RouteTarget>& routes = positions.routes[context_.me()];
  routes.resize(plan.tokens() * std::int64_t{positions.top_k});
  for (std::size_t i = 0; i < routes.size(); ++i) {
    const std::int32_t rank = view.route_rank[i];
    std::int64_t row = view.route_row[i];
    if (rank == -1 || row == -1) continue;
    const bool rank_exists = rank >= 0 && rank < context_.ranks();
    if (rank_exists && row == kRowOfPeer) {
      const auto token = static_cast<std::int32_t>(i) / positions.top_k,
                 slot = static_cast<std::int32_t>(i) % positions.top_k;
      row = row_of_source(rank, {.rank = context_.me(), .token = token, .slot = slot});
    }
    const bool exists = rank_exists && row >= 0 && row < summary_of(rank).count;
    if (exists && row >= summary_of(rank).rows_end) continue;  // the rank has not stored it
    if (exists) routes[i] = {.destination = rank, .local = -1, .row = row};
    if (!exists) record_bad_source(static_cast<std::int64_t>(i));
  }
  const std::int64_t total = plan.total();
  std::vector<std::vector<std::int64_t>>& shared = positions.shared_rows[context_.me()];
  shared.resize(context_.config.shared_experts, std::vector<std::int64_t>(plan.tokens(), -1));
  for (std::int64_t row = 0; row < total && !shared.empty(); ++row) {
    const auto [rank, token, slot] = view.sources[row];
    if (rank != context_.me() || slot < positions.top_k) continue;
    const bool exists =
        token >= 0 && token < plan.tokens() && slot - positions.top_k < context_.config.shared_experts;
    if (exists) shared[slot - positions.top_k][token] = row;
    if (!exists) record_bad_source(row);
  }
  return positions;
}

oracle::ExpertOutputs Lane::read_combine_inputs(const CombineCall& call) const {
  oracle::ExpertOutputs inputs{.outputs = context_.config.combine_type,
                               .result = call.result.type,
                               .reduction = call.reduction,
                               .weighted = call.topk_weights == nullptr,
                               .topk_weighted = call.topk_weights != nullptr,
                               .shared_outputs = call.shared_outputs != nullptr,
                               .ranks = {}};
  const std::int64_t combine_row_bytes = context_.config.hidden * bytes_of(context_.config.combine_type);
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    const std::int64_t rows = summary_of(peer).count;
    const std::byte* staging = combine_staging(peer);
    const auto* weights =
        reinterpret_cast<const float*>(staging + context_.staging.max_rows * combine_row_bytes);
    oracle::RankOutputs outputs;
    outputs.rows.assign(staging, staging + rows * combine_row_bytes);
    outputs.weights.assign(weights, weights + rows);
    outputs.row_values.assign(weights + context_.staging.max_rows,
                              weights + context_.staging.max_rows + rows);
    inputs.ranks.push_back(std::move(outputs));
  }
  const std::int64_t slots = call.plan.tokens() * std::int64_t{context_.config.top_k};
  if (call.topk_weights != nullptr) {
    inputs.ranks[context_.me()].topk_weights.assign(call.topk_weights, call.topk_weights + slots);
  }
  return inputs;
}

// The result after the call's epilogue.
std::vector<std::byte> Lane::with_residual(std::vector<std::byte> result) const {
  const Epilogue& epilogue = combine_.epilogue;
  const std::int64_t row_bytes = context_.config.hidden * bytes_of(combine_.result.type);
  const std::int64_t stride = epilogue.stride > 0 ? epilogue.stride : row_bytes;
  const auto* const rows = static_cast<const std::byte*>(epilogue.residual);
  std::vector<std::byte> residual(rows != nullptr ? result.size() : 0);
  for (std::size_t at = 0, row = 0; at < residual.size(); at += row_bytes, ++row)
    std::memcpy(residual.data() + at, rows + row * stride, row_bytes);
  return oracle::with_epilogue(combine_.result.type, std::move(result), epilogue.scale,
                               rows != nullptr ? residual.data() : nullptr);
}

void Lane::combine_receive() {
  wait_all();
  fault_point(FaultPoint::combine_waited, context_.me());
  require_same("combine", "outputs and result", &CallSummary::rows_given);
  require_same("combine", "row_values and route_values", &CallSummary::values_given);
  require_same("combine", "row_weights", &CallSummary::weights_given);
  const oracle::RowPositions positions = positions_of(combine_.plan);
  const oracle::ExpertOutputs inputs = read_combine_inputs(combine_);
  if (combine_.result.data != nullptr) {
    std::vector<std::byte> result =
        combined(context_.config, positions, inputs, context_.rank.topology(), context_.me());
    if (!combine_.epilogue.empty()) result = with_residual(std::move(result));
    const std::int64_t row_bytes = context_.config.hidden * bytes_of(combine_.result.type);
    const std::int64_t stride = combine_.result.stride > 0 ? combine_.result.stride : row_bytes;
    auto* out = static_cast<std::byte*>(combine_.result.data);
    for (std::size_t at = 0; at < result.size(); at += row_bytes, out += stride) {
      std::memcpy(out, result.data() + at, row_bytes);
    }
  }
  if (combine_.shared_outputs != nullptr) {
    const std::vector<std::byte> rows =
        returned_shared_rows(context_.config, positions, inputs, context_.me());
    std::copy(rows.begin(), rows.end(), static_cast<std::byte*>(combine_.shared_outputs));
  }
  if (combine_.route_values != nullptr) {
    const std::vector<float> values = returned_row_values(positions, inputs, context_.me());
    std::copy(values.begin(), values.end(), combine_.route_values);
  }
  count_combine(combine_);
  fault_point(FaultPoint::combine_done, context_.me());
}

void Lane::count_combine(const CombineCall& call) {
  const bool partial = call.reduction == Reduction::partial;
  const std::int64_t values = call.row_values == nullptr ? 0 : 4 * (partial ? context_.config.top_k : 1);
  const std::int64_t row =
      call.outputs.data == nullptr ? 0 : context_.config.hidden * bytes_of(context_.config.combine_type);
  const Topology& topology = context_.rank.topology();
  for (int to = 0; to < context_.ranks(); ++to) {
    if (to == context_.me()) continue;
    const std::int64_t messages =
        partial ? call.plan.tokens_between()[to * context_.ranks() + context_.me()]
                : std::count_if(call.plan.sources().begin(), call.plan.sources().end(),
                                [&](const Source& source) { return source.rank == to; });
    counts.count_combine({.messages = messages, .bytes = messages * (row + values)},
                         topology.node_of(to) != topology.node_of(context_.me()));
  }
}

}  // namespace ferry::reference
