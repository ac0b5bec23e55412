// What happens to messages that an engine carries (host/engine_layout.hpp) before a kernel stores them and
// after they have been transferred.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda {

// Clears the slot metadata of all messages from this rank, before it sends by a plan: a damaged plan leaves
// out messages, and in their place lies what earlier calls have stored.
void launch_clear_metadata(const LaneView& lane, cudaStream_t stream);

struct ArrivedMessages {
  LaneView lane;
  std::int32_t from[kMaxDeviceRanks];  // messages that have arrived from each rank
};

// Sets the flags of messages that have arrived, with the number of the lane's next call. Messages without
// slot metadata of this call are skipped: their sender has not stored them.
void launch_mark_arrived(const ArrivedMessages& arguments, cudaStream_t stream);

void prepare_engine_messages();  // loads the kernels on the current device

}  // namespace ferry::cuda
