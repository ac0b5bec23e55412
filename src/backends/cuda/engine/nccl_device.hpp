// The rank's CUDA device, as the engine `nccl` uses it.
#pragma once

#include "engine/device_stream.hpp"

namespace ferry::cuda {

// Of the device that is current.
DeviceAccess access_current_device();

}  // namespace ferry::cuda
