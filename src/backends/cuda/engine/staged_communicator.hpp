// Lets an engine that only takes host memory carry messages of device memory, through pinned memory.
#pragma once

#include <memory>

#include "engine/engine.hpp"

namespace ferry::cuda {

// Takes host and device memory of the device that is current at construction.
std::unique_ptr<Communicator> stage_device_memory(std::unique_ptr<Communicator> communicator);

}  // namespace ferry::cuda
