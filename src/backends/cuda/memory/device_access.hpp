// Checks the caller's pointers before a launch: a kernel that accesses host memory destroys the CUDA context.
#pragma once

namespace ferry::cuda {

// Throws UsageError if kernels of `device` cannot access the memory. A null pointer passes. `name`: of the
// argument.
void require_device_access(const char* name, const void* pointer, int device);

}  // namespace ferry::cuda
