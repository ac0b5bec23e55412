// Combine of the reference backend: every rank shows its rows in the wire type; the home rank reads those it
// needs.
#include <algorithm>
#include <cstring>

#include "backends/reference/lane.hpp"
#include "exchange/call_options.hpp"
#include "exchange/configuration.hpp"
#include "group/fault_points.hpp"
#include "oracle/numbers.hpp"

namespace ferry::reference {

void Lane::combine_send(const CombineCall& call) {
  combine_ = call;
  CallOptions options = options_of(call);
  add_plan(call.plan, &options);
  channel_.begin(Operation::combine, options);
  fault_point(FaultPoint::combine_begin, shared_.me());
  const std::int64_t total = call.plan.total(), hidden = shared_.config.hidden;
  const std::int64_t row_bytes = hidden * bytes_of(call.outputs.type),
                     wire_bytes = hidden * bytes_of(shared_.config.combine_type);
  const std::int64_t stride = call.outputs.stride > 0 ? call.outputs.stride : row_bytes;
  const auto* rows = static_cast<const std::byte*>(call.outputs.data);
  std::byte* stage = combine_stage(shared_.me());
  auto* weights = reinterpret_cast<float*>(stage + shared_.stage.rows * wire_bytes);
  float* values = weights + shared_.stage.rows;
  for (std::int64_t row = 0; row < total; ++row) {
    if (rows != nullptr) {
      oracle::convert(call.outputs.type, rows + row * stride, shared_.config.combine_type,
                      stage + row * wire_bytes, hidden);
    }
    weights[row] = call.row_weights != nullptr ? call.row_weights[row] : 1.0f;
    values[row] = call.row_values != nullptr ? call.row_values[row] : 0.0f;
  }
  const bool has_rows = total > 0, matters = has_rows || call.plan.tokens() > 0;
  write_note({.count = total,
              .weighted = Note::said(call.row_weights, has_rows),
              .rows_given = Note::said(has_rows ? call.outputs.data : call.result.data, matters),
              .values_given = Note::said(has_rows ? call.row_values : call.route_values, matters)});
  fault_point(FaultPoint::combine_rows_sent, shared_.me());
  post_all();
  fault_point(FaultPoint::combine_posted, shared_.me());
}

// As far as a combine needs them: where this rank's own routes are. Entries that point nowhere are skipped
// and noted.
oracle::RowPositions Lane::places_of(const Plan& plan) {
  const PlanView view = view_plan(plan.storage(), plan_shape(shared_.config));
  oracle::RowPositions positions;
  positions.top_k = shared_.config.top_k;
  positions.ranks.resize(shared_.ranks());
  positions.routes.resize(shared_.ranks());
  std::vector<oracle::RouteTarget>& routes = positions.routes[shared_.me()];
  routes.resize(plan.tokens() * std::int64_t{positions.top_k});
  for (std::size_t i = 0; i < routes.size(); ++i) {
    const std::int32_t rank = view.route_rank[i], row = view.route_row[i];
    if (rank == -1 || row == -1) continue;
    const bool exists = rank >= 0 && rank < shared_.ranks() && row >= 0 && row < note_of(rank).count;
    if (exists) routes[i] = {.destination = rank, .local = -1, .row = row};
    if (!exists) record_bad_source(static_cast<std::int64_t>(i));
  }
  return positions;
}

oracle::Outcome Lane::read_outcome(const CombineCall& call) const {
  oracle::Outcome outcome{.outputs = shared_.config.combine_type,
                          .result = call.result.type,
                          .reduction = call.reduction,
                          .weighted = call.topk_weights == nullptr,
                          .topk_weighted = call.topk_weights != nullptr,
                          .ranks = {}};
  const std::int64_t wire_bytes = shared_.config.hidden * bytes_of(shared_.config.combine_type);
  for (int peer = 0; peer < shared_.ranks(); ++peer) {
    const std::int64_t rows = note_of(peer).count;
    const std::byte* stage = combine_stage(peer);
    const auto* weights = reinterpret_cast<const float*>(stage + shared_.stage.rows * wire_bytes);
    oracle::RankOutputs outputs;
    outputs.rows.assign(stage, stage + rows * wire_bytes);
    outputs.weights.assign(weights, weights + rows);
    outputs.row_values.assign(weights + shared_.stage.rows, weights + shared_.stage.rows + rows);
    outcome.ranks.push_back(std::move(outputs));
  }
  const std::int64_t slots = call.plan.tokens() * std::int64_t{shared_.config.top_k};
  if (call.topk_weights != nullptr) {
    outcome.ranks[shared_.me()].topk_weights.assign(call.topk_weights, call.topk_weights + slots);
  }
  return outcome;
}

void Lane::combine_receive() {
  wait_all();
  fault_point(FaultPoint::combine_waited, shared_.me());
  require_alike("combine", "outputs and result", &Note::rows_given);
  require_alike("combine", "row_values and route_values", &Note::values_given);
  require_alike("combine", "weights of the rows", &Note::weighted);
  const oracle::RowPositions positions = places_of(combine_.plan);
  const oracle::Outcome outcome = read_outcome(combine_);
  if (combine_.result.data != nullptr) {
    const std::vector<std::byte> result = combined(shared_.config, positions, outcome, shared_.me());
    const std::int64_t row_bytes = shared_.config.hidden * bytes_of(combine_.result.type);
    const std::int64_t stride = combine_.result.stride > 0 ? combine_.result.stride : row_bytes;
    auto* to = static_cast<std::byte*>(combine_.result.data);
    for (std::size_t at = 0; at < result.size(); at += row_bytes, to += stride) {
      std::memcpy(to, result.data() + at, row_bytes);
    }
  }
  if (combine_.route_values != nullptr) {
    const std::vector<float> values = values_home(positions, outcome, shared_.me());
    std::copy(values.begin(), values.end(), combine_.route_values);
  }
  count_combine(combine_);
  fault_point(FaultPoint::combine_done, shared_.me());
}

void Lane::count_combine(const CombineCall& call) {
  const bool partial = call.reduction == Reduction::partial;
  const std::int64_t values = call.row_values == nullptr ? 0 : 4 * (partial ? shared_.config.top_k : 1);
  const std::int64_t row =
      call.outputs.data == nullptr ? 0 : shared_.config.hidden * bytes_of(shared_.config.combine_type);
  std::int64_t messages = 0;
  if (partial) {
    for (int home = 0; home < shared_.ranks(); ++home) {
      if (home != shared_.me()) messages += call.plan.tokens_between()[home * shared_.ranks() + shared_.me()];
    }
  } else {
    messages =
        std::count_if(call.plan.sources().begin(), call.plan.sources().end(),
                      [&](const Source& source) { return source.rank >= 0 && source.rank != shared_.me(); });
  }
  wire.combine_messages += messages;
  wire.combine_bytes += messages * (row + values);
}

}  // namespace ferry::reference
