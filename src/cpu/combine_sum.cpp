// A token's sum on one rank: the first step of partial, computed where the experts are.
#include "cpu/combine.hpp"

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
    weights[count] = call_.weights != nullptr ? call_.weights[rows[slot]] : 1.0f;
    ++count;
    if (shared_.config.layout == Layout::rank_major) break;  // every slot names the one row
  }
  return count;
}

void Combine::sum_on_rank(void* out, const std::int32_t* rows, std::int64_t where, Store store) {
  const void* outputs[kMaxTopK];
  float weights[kMaxTopK];
  const int count = gather_rows(rows, where, outputs, weights);
  shared_.kernels.weighted_sum({.out = out,
                                .out_type = shared_.config.wire,
                                .rows = outputs,
                                .row_type = call_.outputs.type,
                                .wire_type = shared_.config.wire,
                                .weights = call_.weights != nullptr ? weights : nullptr,
                                .count = count,
                                .columns = shared_.config.hidden,
                                .store = store});
}

}  // namespace ferry::cpu
