// The expected results of all_gather_v and reduce_scatter_v.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/types.hpp"

namespace ferry::oracle {

using Bytes = std::vector<std::byte>;

// The rows of all ranks, in rank order.
Bytes gathered(const std::vector<Bytes>& rows_of_ranks);

// The sums of the rows [first, first + count): each value is added in fp32, in rank order from +0, and
// rounded once to `type`. `rows_of_ranks`: [total, columns] of `type` from each rank.
Bytes scattered_sums(const std::vector<Bytes>& rows_of_ranks, DType type, std::int64_t columns,
                     std::int64_t first, std::int64_t count);

}  // namespace ferry::oracle
