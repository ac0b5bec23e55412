#include "exchange/sliced.hpp"

#include "base/text.hpp"
#include "exchange/lane_counts.hpp"
#include "ferry/error.hpp"
#include "format/encoding.hpp"

namespace ferry {
namespace {

[[noreturn]] void refuse(const char* what, const char* remedy) {
  throw UnsupportedError(str("experts in slices (Placement::ep_tp) do not have ", what, ": ", remedy));
}

}  // namespace

LoadCounts load_of_slices(const LoadCounts& slices, const Config& config) {
  const Placement& placement = config.placement;
  const auto tp = static_cast<std::size_t>(placement.tp());
  LoadCounts sum = no_load(config);
  sum.dispatches = slices.dispatches;
  for (std::size_t slice = 0; slice < slices.layers.size(); ++slice)
    sum.layers[slice / tp] += slices.layers[slice];
  for (std::size_t slice = 0; slice < slices.experts.size(); ++slice)
    sum.experts[slice / tp] += slices.experts[slice];
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    for (const int expert : placement.experts_of(rank))
      sum.ranks[static_cast<std::size_t>(rank)] += sum.experts[static_cast<std::size_t>(expert)];
  }
  return sum;
}

void unsliced_id(const Config& config, std::int64_t first_token, BadId& bad) {
  if (bad.count == 0) return;
  bad.token += static_cast<std::int32_t>(first_token);
  bad.id = ExpertSlices{config.experts, config.placement.tp()}.unsliced_bad_id(bad.id);
}

Config routed_config(const Config& config) {
  const Placement& placement = config.placement;
  const int tp = placement.tp();
  std::vector<ExpertLocation> locations;
  for (const ExpertLocation& slice_0 : placement.locations()) {
    for (int i = 0; i < tp; ++i) locations.push_back({slice_0.rank + i, slice_0.local});
  }
  Config routed = config;
  routed.experts = config.experts * tp;
  routed.placement = Placement::table(std::move(locations), placement.ranks(), placement.version());
  routed.max_tokens = (config.max_tokens + tp - 1) / tp;
  routed.alignment = 1;
  routed.zero_padding = false;
  // Only the ranks with the same tp rank send here.
  routed.capacity = std::int64_t{placement.ranks() / tp} * routed.max_tokens * config.top_k;
  routed.own_receive_buffers = true;
  return routed;
}

void check_sliced(const Config& config) {
  const int tp = config.placement.tp();
  if (config.layout != Layout::expert_major)
    refuse("the layouts expert_padded, rank_major and expert_indexed", "use expert_major");
  if (config.shared_experts > 0) refuse("shared experts", "pass shared_experts = 0");
  if (config.local_slots > 0) refuse("local_slots", "pass local_slots = 0");
  if (config.input != Input::own) refuse("replicated input", "pass input own");
  if (config.transfer != Transfer::routed) refuse("gathered input", "pass transfer = routed");
  if (encoding_of(config.format).scale_columns || encoding_of(config.format).scale_tiles)
    refuse("scales in columns or tiles", "use a format with scales by rows");
  if (config.capacity != 0) {
    throw UsageError(str("configuration: capacity = ", config.capacity, " with tp = ", tp,
                         ", must be 0: experts in slices have room for any routing"));
  }
  if (std::int64_t{config.experts} * tp > 1 << 20) {
    throw UsageError(str("configuration: experts = ", config.experts, " in tp = ", tp,
                         " slices, there may be ", 1 << 20, " slices at most"));
  }
}

void check_sliced_dispatch(const DispatchCall& call) {
  if (!call.plan.empty()) refuse("a dispatch by plan", "pass ids");
  if (encoding_of(call.format).scale_columns || encoding_of(call.format).scale_tiles)
    refuse("scales in columns or tiles", "use a format with scales by rows");
  if (!call.input_scales.empty()) refuse("input_scales", "pass none");
  if (call.dot_rows != nullptr) refuse("dot_rows and combine_backward", "pass none");
  if (call.memory.rows != 0 || call.memory.count_sums != nullptr)
    refuse("memory.rows and memory.count_sums", "pass memory for the capacity");
}

void check_sliced_combine(const CombineCall& call) {
  if (call.row_values != nullptr || call.route_values != nullptr)
    refuse("row_values and route_values", "pass none");
  if (!call.epilogue.empty()) refuse("an epilogue", "apply it to the result");
}

}  // namespace ferry
