// How kernels are launched: all blocks of a launch wait for one another, so all must be resident at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "ferry/types.hpp"

namespace ferry::cuda {

inline cudaStream_t handle_of(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

struct LaunchShape {
  int blocks = 1;
  bool cooperative = false;  // the driver makes sure of residency; not with several ranks or lanes a device
};

// Once before launches of a kernel with `bytes` of shared memory on the current device, whatever other
// exchanges ask for. UnsupportedError if a block cannot have that much.
void allow_shared_bytes(const void* kernel, std::int64_t bytes);

// Throws what `check` throws.
void launch(const void* kernel, void* arguments, int threads, std::size_t shared_bytes,
            const LaunchShape& shape, cudaStream_t stream, const char* doing);

}  // namespace ferry::cuda
