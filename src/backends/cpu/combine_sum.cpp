// The sum of a token's rows on one rank: the first step of `partial`, computed on the rank of the experts.
#include "backends/cpu/combine.hpp"

namespace ferry::cpu {

const void* Combine::output_row(std::int64_t row) const {
  const std::int64_t dense = context_.config.hidden * bytes_of(call_.outputs.type);
  const std::int64_t stride = call_.outputs.stride != 0 ? call_.outputs.stride : dense;
  return static_cast<const std::byte*>(call_.outputs.data) + row * stride;
}

// Collects the token's rows on this rank in slot order, with their weights (1 if the call has none). `entry`
// is the index of rows[0] in the plan, for the report of a bad entry.
int Combine::gather_rows(const std::int32_t* rows, std::int64_t entry, const void** outputs, float* weights) {
  int count = 0;
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    if (rows[slot] == -1 || !lane_.valid_entry(rows[slot], plan_.header->total, entry + slot)) continue;
    outputs[count] = output_row(rows[slot]);
    weights[count] = call_.row_weights != nullptr ? call_.row_weights[rows[slot]] : 1.0f;
    ++count;
    if (context_.config.layout == Layout::rank_major) break;  // all slots name the same row
  }
  return count;
}

// The rows that a later sum will read. Skips invalid entries; they are counted when that sum is computed.
int Combine::rows_to_prefetch(const std::int32_t* rows, const void** outputs) const {
  if (!carries_rows_) return 0;
  int count = 0;
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    if (rows[slot] >= 0 && rows[slot] < plan_.header->total) outputs[count++] = output_row(rows[slot]);
    if (count > 0 && context_.config.layout == Layout::rank_major) break;  // all slots name the same row
  }
  return count;
}

// `next_rows`: rows of the next sum, to be prefetched during this one; null: none.
void Combine::sum_on_rank(void* out, const std::int32_t* rows, std::int64_t entry, Store store,
                          const std::int32_t* next_rows) {
  const void* next[kMaxTopK];
  const void* outputs[kMaxTopK];
  float weights[kMaxTopK];
  const int count = gather_rows(rows, entry, outputs, weights);
  context_.kernels.weighted_sum({.out = out,
                                 .out_type = context_.config.combine_type,
                                 .rows = outputs,
                                 .row_type = call_.outputs.type,
                                 .combine_type = context_.config.combine_type,
                                 .weights = call_.row_weights != nullptr ? weights : nullptr,
                                 .count = count,
                                 .columns = context_.config.hidden,
                                 .store = store,
                                 .next = next,
                                 .next_count = next_rows != nullptr ? rows_to_prefetch(next_rows, next) : 0});
}

}  // namespace ferry::cpu
