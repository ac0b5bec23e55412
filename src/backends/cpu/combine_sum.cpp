// A token's sum on one rank: the first step of partial, computed where the experts are.
#include "backends/cpu/combine.hpp"

namespace ferry::cpu {

const void* Combine::output_row(std::int64_t row) const {
  const std::int64_t dense = shared_.config.hidden * bytes_of(call_.outputs.type);
  const std::int64_t stride = call_.outputs.stride != 0 ? call_.outputs.stride : dense;
  return static_cast<const std::byte*>(call_.outputs.data) + row * stride;
}

// The token's rows here in slot order, with their weights (1 where none are given).
int Combine::gather_rows(const std::int32_t* rows, std::int64_t where, const void** outputs, float* weights) {
  int count = 0;
  for (int slot = 0; slot < shared_.config.top_k; ++slot) {
    if (rows[slot] == -1 || !lane_.usable(rows[slot], plan_.header->total, where + slot)) continue;
    outputs[count] = output_row(rows[slot]);
    weights[count] = call_.row_weights != nullptr ? call_.row_weights[rows[slot]] : 1.0f;
    ++count;
    if (shared_.config.layout == Layout::rank_major) break;  // every slot names the one row
  }
  return count;
}

// Rows that are added soon, in memory until then. Their entries are judged when they are used.
int Combine::rows_to_fetch(const std::int32_t* rows, const void** outputs) const {
  if (!carries_rows_) return 0;
  int count = 0;
  for (int slot = 0; slot < shared_.config.top_k; ++slot) {
    if (rows[slot] >= 0 && rows[slot] < plan_.header->total) outputs[count++] = output_row(rows[slot]);
    if (count > 0 && shared_.config.layout == Layout::rank_major) break;  // every slot names the one row
  }
  return count;
}

// `next_rows`: of the sum that comes after this one, or null.
void Combine::sum_on_rank(void* out, const std::int32_t* rows, std::int64_t where, Store store,
                          const std::int32_t* next_rows) {
  const void* next[kMaxTopK];
  const void* outputs[kMaxTopK];
  float weights[kMaxTopK];
  const int count = gather_rows(rows, where, outputs, weights);
  shared_.kernels.weighted_sum({.out = out,
                                .out_type = shared_.config.combine_type,
                                .rows = outputs,
                                .row_type = call_.outputs.type,
                                .wire_type = shared_.config.combine_type,
                                .weights = call_.row_weights != nullptr ? weights : nullptr,
                                .count = count,
                                .columns = shared_.config.hidden,
                                .store = store,
                                .next = next,
                                .next_count = next_rows != nullptr ? rows_to_fetch(next_rows, next) : 0});
}

}  // namespace ferry::cpu
