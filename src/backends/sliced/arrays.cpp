#include <algorithm>
#include <utility>

#include "backends/sliced/steps.hpp"
#include "exchange/sliced.hpp"
#include "plan/shapes.hpp"

namespace ferry::sliced {

SlicedArrays sliced_arrays(const Config& config, int rank) {
  const Config routed = routed_config(config);
  const std::int64_t rows = row_capacity(config, rank), routed_rows = row_capacity(routed, rank);
  const std::int64_t message = exchange_shape(config, 0).message_bytes,
                     values = 4 * std::int64_t{config.hidden};
  const std::int64_t packed =
      std::max<std::int64_t>(message + static_cast<std::int64_t>(sizeof(SliceRowTail)), values);
  const std::int64_t slots = config.reduction == Reduction::partial ? 1 : config.top_k;
  const std::int64_t results = config.max_tokens * slots * values, sent = routed.max_tokens;
  const std::int64_t local = config.placement.local_experts(rank), tp = config.placement.tp();
  const std::int64_t segments = local * config.placement.ranks();
  SlicedArrays arrays;
  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) {
    return std::exchange(end, align_up(end + bytes, kSliceAlignment));
  };
  arrays.parts = take(config.own_receive_buffers ? rows * message + kMaxParts * kSliceAlignment : 0);
  arrays.source = take(rows * static_cast<std::int64_t>(sizeof(Source)));
  arrays.weight = take(rows * 4);
  arrays.counts = take(4 * local);
  arrays.row_offsets = take(4 * (local + 1));
  arrays.group_expert = take(4 * local);
  arrays.result_bytes = end;
  arrays.state = take(sizeof(SliceState));
  arrays.all_calls = take(sizeof(SliceTotals));
  arrays.terms = take((config.placement.ranks() + 1) * static_cast<std::int64_t>(sizeof(SliceTerms)));
  arrays.ids = take(sent * config.top_k * 8);
  arrays.weights = take(sent * config.top_k * 4);
  arrays.tokens = take(sent * std::max(message, values) + kMaxParts * kSliceAlignment);
  arrays.segments = take(4 * (2 * segments + 1 + 2 * tp * local + local));
  arrays.own = take(std::max(routed_rows * packed, results));
  arrays.all = take(std::max(rows * packed, results));
  arrays.row_weights = take(routed_rows * 4);
  arrays.bytes = end;
  return arrays;
}

}  // namespace ferry::sliced
