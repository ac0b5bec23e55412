// The arrays of a combine by source, by MAX's names.
#pragma once

#include <cstdint>

#include "exchange/overlap.hpp"
#include "ferry/max.hpp"

namespace ferry::max {

// Throws UsageError if an array that the combine writes overlaps another. `known`: rows as far as the host
// knows.
inline void require_apart(const Config& config, const CombineInput& input, const CombineOutput& output,
                          const KnownRows& known) {
  const std::int64_t slots = config.top_k;
  const std::int64_t results = config.reduction == Reduction::unreduced ? slots : 1,
                     result_row = config.hidden * bytes_of(output.output_tokens.type);
  CallArrays arrays;
  const Outputs& rows = input.input_tokens;
  arrays.read("input_tokens", rows.data, rows.rows > 0 ? rows.rows : known.total,
              config.hidden * bytes_of(rows.type), rows.stride);
  const auto read = [&](const char* name, auto values) {
    arrays.read(name, values.data(), 1, static_cast<std::int64_t>(values.size_bytes()));
  };
  if (known.total == kUnknownRows) {
    arrays.read("src_info", input.src_info.data(), 1, kUnknownRows);
  } else {
    read("src_info", input.src_info);
  }
  read("row_offsets", input.row_offsets);
  read("counts", input.counts);
  if (input.tokens > 0)
    arrays.read("topk_ids", input.topk_ids.data, input.tokens * slots, bytes_of(input.topk_ids.type));
  arrays.read("router_weights", output.router_weights, known.tokens, 4 * slots);
  add_result("output_tokens", output.output_tokens, known.tokens * results, result_row, output.epilogue,
             arrays);
  arrays.write("shared_outputs", output.shared_outputs, config.shared_experts * known.tokens, result_row);
  arrays.require_apart("", -1);
}

}  // namespace ferry::max
