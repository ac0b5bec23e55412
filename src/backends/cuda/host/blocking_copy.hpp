// Small copies between host and device beside whatever runs in the caller's streams.
#pragma once

#include <cstdint>

namespace ferry::cuda {

// Copies in either direction and returns when it is done. Waits for no other stream. SystemError.
void copy(void* to, const void* from, std::int64_t bytes);

}  // namespace ferry::cuda
