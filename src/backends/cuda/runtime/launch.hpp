// Launches kernels. The blocks of a launch wait for one another, so all of them must be resident at once.
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
  bool cooperative = false;  // the driver guarantees residency; not where ranks or lanes share the device
  bool cluster = false;      // all blocks form one cluster: at most 8
};

// Raises the kernel's limit of dynamic shared memory on the current device to the most a block can have. Call
// before its first launch. Throws UnsupportedError if a block cannot have `bytes`.
void allow_shared_bytes(const void* kernel, std::int64_t bytes);

// Loads a kernel on the current device. CUDA would load it at its first launch, and may wait until the device
// is idle. Behind a kernel that waits for peers that holds up this rank, and all ranks of its process.
void load_kernel(const void* kernel);
template <class... Kernels>
void load_kernels(Kernels*... kernels) {
  (load_kernel(reinterpret_cast<const void*>(kernels)), ...);
}

// `action`: for the error message, as for check(), which throws.
void launch(const void* kernel, void* arguments, int threads, std::size_t shared_bytes,
            const LaunchShape& shape, cudaStream_t stream, const char* action);

// Launches a kernel with one argument and no dynamic shared memory.
template <class Arguments>
void launch(void (*kernel)(Arguments), const Arguments& arguments, int threads, const LaunchShape& shape,
            cudaStream_t stream, const char* action) {
  launch(reinterpret_cast<const void*>(kernel), const_cast<Arguments*>(&arguments), threads, 0, shape, stream,
         action);
}
template <class Arguments>
void launch(void (*kernel)(Arguments), const Arguments& arguments, int threads, int blocks,
            cudaStream_t stream, const char* action) {
  launch(kernel, arguments, threads, LaunchShape{.blocks = blocks}, stream, action);
}

// Such a kernel as host code sees it: defined beside the kernel, which only its own source knows.
template <class Arguments>
struct Kernel {
  void (*kernel)(Arguments);
  int threads;
  const char* action;  // for the error message

  void load() const { load_kernel(reinterpret_cast<const void*>(kernel)); }
  void operator()(const Arguments& arguments, const LaunchShape& shape, Stream stream) const {
    launch(kernel, arguments, threads, shape, handle_of(stream), action);
  }
};

}  // namespace ferry::cuda
