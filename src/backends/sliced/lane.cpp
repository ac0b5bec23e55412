#include "backends/sliced/lane.hpp"

#include <algorithm>
#include <utility>

#include "format/parts.hpp"
#include "layout/message.hpp"
#include "plan/shapes.hpp"

namespace ferry::sliced {

LocalArrays local_arrays(const Config& config, int rank) {
  const Config routed = routed_config(config);
  const std::int64_t rows = row_capacity(config, rank), routed_rows = row_capacity(routed, rank);
  const std::int64_t message = exchange_shape(config, 0).message_bytes;
  const std::int64_t values = padded(4 * std::int64_t{config.hidden});
  const std::int64_t packed =
      std::max<std::int64_t>(message + static_cast<std::int64_t>(sizeof(Source)) + 4, values);
  const std::int64_t slots = config.reduction == Reduction::partial ? 1 : config.top_k;
  const std::int64_t results = config.max_tokens * slots * values;
  LocalArrays arrays;
  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) { return std::exchange(end, padded(end + bytes)); };
  arrays.parts = take(config.own_receive_buffers ? rows * message + kMaxParts * kRowAlignment : 0);
  arrays.source = take(rows * static_cast<std::int64_t>(sizeof(Source)));
  arrays.weight = take(rows * 4);
  arrays.counts = take(4 * config.placement.local_experts(rank));
  arrays.row_offsets = take(4 * (config.placement.local_experts(rank) + 1));
  arrays.result_bytes = end;
  arrays.ids = take(std::int64_t{routed.max_tokens} * config.top_k * 8);
  arrays.own = take(std::max(routed_rows * packed, results));
  arrays.all = take(std::max(rows * packed, results));
  arrays.row_weights = take(routed_rows * 4);
  arrays.bytes = end;
  return arrays;
}

Lane::Lane(const SlicedContext& context, int index)
    : context_(context),
      index_(index),
      arrays_(local_arrays(context.config, context.me())),
      memory_(arrays_.bytes) {}

CallDiagnostics Lane::take_diagnostics() {
  CallDiagnostics found = context_.inner->take_diagnostics(index_);
  unsliced_id(context_.config, first_token_, found.bad_id);
  return found;
}

}  // namespace ferry::sliced
