// Kernels around an engine's transfer of messages (host/engine_layout.hpp): one before the messages are
// stored, one after they have arrived.
#pragma once

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {

// Clears the slot metadata of all messages from this rank, before it sends by a plan. A damaged plan leaves
// out messages; what earlier calls have stored there must not be taken for them.
extern const Kernel<LaneView> kClearMetadataKernel;

struct ArrivedMessages {
  LaneView lane;
  std::int32_t from[kMaxDeviceRanks];  // messages that have arrived from each rank
};

// Sets the flags of messages that have arrived, with the number of the lane's next call. Skips messages
// without slot metadata of this call, which their sender has not stored.
extern const Kernel<ArrivedMessages> kMarkArrivedKernel;

}  // namespace ferry::cuda
