// Finds out what memory an address belongs to.
#pragma once

#include "backends/cuda/memory/pointer_check.hpp"

namespace ferry::cuda {

// The memory at `address`, and whether kernels of `device` can access it. One call of the driver, and another
// for memory of another device.
MemoryFound find_memory(const void* address, int device);

}  // namespace ferry::cuda
