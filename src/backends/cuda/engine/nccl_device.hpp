// The rank's CUDA device, as the engine `nccl` uses it.
#pragma once

#include "engine/engine.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

// Access to the current device, for exchanges of `rank`.
DeviceAccess access_current_device(const Rank& rank);

}  // namespace ferry::cuda
