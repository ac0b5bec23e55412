// Small copies between host and device that do not wait for the caller's streams.
#pragma once

#include <cstdint>

namespace ferry::cuda {

// Copies in either direction, in copy_stream(), and returns when the copy is done. May be called while
// streams are captured, in any mode and by any thread, and does not become part of the capture. Throws
// SystemError.
void copy_blocking(void* to, const void* from, std::int64_t bytes);

}  // namespace ferry::cuda
