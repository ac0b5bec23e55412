// The small calls of a lane.
#pragma once

#include "backends/cpu/lane.hpp"

namespace ferry::cpu {

// The result is memory of the lane.
SmallResult run(Lane& lane, const MetadataCall& call);
// Sends each route's value to its row; padding rows get 0.
SmallResult run(Lane& lane, const RouteValuesCall& call);
// Counts what a dispatch of the ids delivers to this rank. The arrays are those of the lane.
SmallResult run(Lane& lane, const DispatchCountsCall& call);
// Several calls of the lane: one in which the ranks exchange their counts, then one for each round of data. A
// round carries as many bytes between two ranks as a dispatch stages for a pair.
SmallResult run(Lane& lane, const GatherCall& call);

}  // namespace ferry::cpu
