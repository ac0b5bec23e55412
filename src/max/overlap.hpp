// The arrays of a combine by source, by MAX's names.
#pragma once

#include <cstdint>

#include "exchange/overlap.hpp"
#include "ferry/max.hpp"

namespace ferry::max {

// MAX's arrays beside those of every combine, which are of any lengths.
struct SourceArrays {
  const void *src_info, *row_offsets, *counts;
  std::int64_t src_info_bytes, row_offsets_bytes, counts_bytes;
  Ids topk_ids;
  std::int64_t ids;  // entries of topk_ids
};

// Throws UsageError if an array that the combine writes overlaps another. `known`: rows as far as the host
// knows.
inline void require_apart(const Config& config, const SourceArrays& source, const Outputs& input,
                          const CombineOutput& output, const KnownRows& known) {
  const std::int64_t slots = config.top_k;
  const std::int64_t results = config.reduction == Reduction::unreduced ? slots : 1,
                     result_row = config.hidden * bytes_of(output.output_tokens.type);
  CallArrays arrays;
  arrays.read("input_tokens", input.data, input.rows > 0 ? input.rows : known.total,
              config.hidden * bytes_of(input.type), input.stride);
  arrays.read("src_info", source.src_info, 1, source.src_info_bytes);
  arrays.read("row_offsets", source.row_offsets, 1, source.row_offsets_bytes);
  arrays.read("counts", source.counts, 1, source.counts_bytes);
  arrays.read("topk_ids", source.topk_ids.data, source.ids, bytes_of(source.topk_ids.type));
  arrays.read("router_weights", output.router_weights, known.tokens, 4 * slots);
  add_result("output_tokens", output.output_tokens, known.tokens * results, result_row, output.epilogue,
             arrays);
  arrays.write("shared_outputs", output.shared_outputs, config.shared_experts * known.tokens, result_row);
  arrays.require_apart("", -1);
}

}  // namespace ferry::max
