#include "backends/cpu/node_sum.hpp"

#include <utility>

namespace ferry::cpu {

void sum_on_node(const CpuContext& context, void* out, const void* const* rows, int count, Store store) {
  const DType type = context.config.combine_type;
  context.kernels.weighted_sum({.out = out,
                                .out_type = type,
                                .rows = rows,
                                .row_type = type,
                                .combine_type = type,
                                .weights = nullptr,
                                .count = count,
                                .columns = context.config.hidden,
                                .store = store,
                                .next = nullptr,
                                .next_count = 0});
}

void add_within_nodes(const CpuContext& context, PartialSums& sums, std::byte* scratch, std::int64_t stride) {
  // Ranks of a node need not be consecutive. Insertion keeps the rank order of a node's rows.
  PartialSums sorted;
  for (int i = 0; i < sums.count; ++i) {
    sorted.add(sums.rows[i], sums.nodes[i]);
    for (int at = i; at > 0 && sorted.nodes[at - 1] > sorted.nodes[at]; --at) {
      std::swap(sorted.rows[at - 1], sorted.rows[at]);
      std::swap(sorted.nodes[at - 1], sorted.nodes[at]);
    }
  }
  sums.count = 0;
  for (int begin = 0, end = 0; begin < sorted.count; begin = end) {
    while (end < sorted.count && sorted.nodes[end] == sorted.nodes[begin]) ++end;
    const void* sum = sorted.rows[begin];
    // A single row is its own sum: adding it to +0 would change only a -0 or the bits of a NaN, which the
    // source rank's addition, from +0 too, changes in the same way.
    if (end - begin > 1) {
      sum_on_node(context, scratch, sorted.rows + begin, end - begin, Store::cached);
      sum = scratch;
      scratch += stride;
    }
    sums.add(sum, sorted.nodes[begin]);
  }
}

}  // namespace ferry::cpu
