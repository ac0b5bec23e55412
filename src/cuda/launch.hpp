// How kernels are launched: all blocks of a launch wait for one another, so all must be resident at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "ferry/types.hpp"

namespace ferry::cuda {

inline cudaStream_t handle_of(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

struct LaunchShape {
  int blocks = 1;
  bool cooperative = false;  // the driver makes sure of residency; not with several ranks or lanes a device
};

// Throws what `check` throws.
void launch(const void* kernel, void* arguments, int threads, std::size_t shared_bytes,
            const LaunchShape& shape, cudaStream_t stream, const char* doing);

}  // namespace ferry::cuda
