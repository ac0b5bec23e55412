// Route values and step metadata of the reference backend.
#include <cstring>

#include "backends/reference/lane.hpp"
#include "exchange/call_options.hpp"
#include "exchange/configuration.hpp"
#include "group/fault_points.hpp"
#include "oracle/expected.hpp"

namespace ferry::reference {

void Lane::route_values(const float* values, const Plan& plan, float* row_values) {
  const int me = context_.me();
  CallOptions options;
  add_plan(plan, &options);
  channel_.begin(Operation::route_values, options);
  fault_point(FaultPoint::route_values_begin, me);
  const std::int64_t slots = plan.tokens() * std::int64_t{context_.config.top_k};
  std::byte* staging = dispatch_staging(me);
  if (slots > 0) std::memcpy(staging, values, slots * 4);
  write_summary({.count = plan.tokens()});
  fault_point(FaultPoint::route_values_sent, me);
  post_all();
  fault_point(FaultPoint::route_values_posted, me);
  wait_all();
  fault_point(FaultPoint::route_values_waited, me);
  const std::span<const Source> sources = plan.sources();
  for (std::size_t row = 0; row < sources.size(); ++row) {
    const auto [rank, token, slot] = sources[row];
    const bool shared =
        slot >= context_.config.top_k && slot < context_.config.top_k + context_.config.shared_experts;
    if (rank == -1 || shared) row_values[row] = 0;
    if (rank == -1 || shared) continue;
    const bool exists = rank >= 0 && rank < context_.ranks() && token >= 0 &&
                        token < summary_of(rank).count && slot >= 0 && slot < context_.config.top_k;
    if (!exists) {
      record_bad_source(static_cast<std::int64_t>(row));
      continue;
    }
    const std::int64_t index = std::int64_t{token} * context_.config.top_k + slot;
    std::memcpy(&row_values[row], dispatch_staging(rank) + index * 4, 4);
  }
}

const StepMetadata* Lane::metadata(std::int32_t count) {
  const int me = context_.me();
  channel_.begin(Operation::metadata, {});
  fault_point(FaultPoint::metadata_begin, me);
  write_summary({.count = count});
  post_all();
  fault_point(FaultPoint::metadata_posted, me);
  wait_all();
  fault_point(FaultPoint::metadata_waited, me);
  std::vector<std::int32_t> all_counts;
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    all_counts.push_back(static_cast<std::int32_t>(summary_of(peer).count));
  }
  metadata_ = oracle::step_metadata(all_counts, me);
  return &metadata_;
}

DispatchCounts Lane::dispatch_counts(const Ids& ids, std::int32_t tokens) {
  // A dispatch of tokens without parts: only ids travel.
  dispatch_ = {};
  dispatch_.ids = ids;
  dispatch_.tokens.count = tokens;
  channel_.begin(Operation::dispatch_counts, {});
  const std::vector<std::int64_t> mine = ids_of_call();
  if (!mine.empty()) std::memcpy(dispatch_staging(context_.me()), mine.data(), mine.size() * 8);
  write_summary({.count = tokens});
  post_all();
  wait_all();
  oracle::GlobalInputs inputs;
  inputs.config = context_.config;
  tokens_.clear();
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    oracle::RankInputs of_rank;
    of_rank.tokens = summary_of(peer).count;
    of_rank.ids.resize(of_rank.tokens * context_.config.top_k);
    if (!of_rank.ids.empty()) std::memcpy(of_rank.ids.data(), dispatch_staging(peer), of_rank.ids.size() * 8);
    tokens_.push_back(static_cast<std::int32_t>(of_rank.tokens));
    inputs.ranks.push_back(std::move(of_rank));
  }
  const oracle::RowPositions positions = oracle::find_row_positions(inputs);
  routes_.clear();
  for (const int expert : context_.config.placement.experts_of(context_.me())) {
    routes_.push_back(0);
    for (int peer = 0; peer < context_.ranks(); ++peer)
      routes_.back() += positions.counts[peer * context_.config.experts + expert];
  }
  return {positions.ranks[context_.me()].row_offsets.back(), routes_, tokens_};
}

}  // namespace ferry::reference
