// Memory for two hops on the backend `cuda`.
#pragma once

#include "backends/cuda/two_hops/hop_call.hpp"
#include "ferry/config.hpp"
#include "ferry/topology.hpp"

namespace ferry::cuda {

// Layout of a lane's windows. `header_bytes`: of a call header (EngineLayout).
HopLayout hop_layout(const Config& config, const Topology& topology, std::int64_t header_bytes,
                     std::int64_t row_bytes);

// What the launches that move messages take: threads of a block (kHopThreads or kManyHopThreads), and
// channels of a stream, the layout's or fewer. The layout does not depend on max_tokens.
struct HopWidth {
  std::int32_t threads, channels;

  static HopWidth of(const Config& config, const HopShape& shape);
};

// Working memory of a lane; starts as zeros.
struct HopWorkingMemory {
  std::int64_t counts, agreed, states, bytes;
  std::int64_t sections;  // [R] the lane's windows on each rank, for large groups (LaneView::symmetric)

  static HopWorkingMemory of(const HopShape& shape);
};

}  // namespace ferry::cuda
