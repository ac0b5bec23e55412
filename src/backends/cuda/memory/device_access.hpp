// Memory that the caller hands over: a kernel that cannot reach it would take the whole context down.
#pragma once

namespace ferry::cuda {

// Returns if kernels of `device` can use the memory (null: nothing to reach). UsageError says what it is
// instead.
void require_reachable(const char* what, const void* pointer, int device);

}  // namespace ferry::cuda
