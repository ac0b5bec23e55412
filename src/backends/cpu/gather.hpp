// Operations that move rows of all ranks without routing: all_gather_v and reduce_scatter_v.
//
// Each is several calls of the lane: one in which the ranks exchange their counts, then one for each round of
// data. A round carries as many bytes between two ranks as a dispatch stages for a pair.
#pragma once

#include "backends/cpu/lane.hpp"

namespace ferry::cpu {

std::int64_t all_gather_v(Lane& lane, const AllGatherCall& call);
void reduce_scatter_v(Lane& lane, const ReduceScatterCall& call);

}  // namespace ferry::cpu
