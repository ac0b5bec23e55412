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

struct LaunchedKernel {
  const void* handle;
  int threads;  // of a block
  std::size_t shared_bytes;
  const char* action;  // for the error message, as for check(), which throws
};
void launch(const LaunchedKernel& kernel, const void* arguments, const LaunchShape& shape,
            cudaStream_t stream);

// The kernels that the library has as constants. Each enters the list when its constructor runs, before
// main() or when the library is loaded.
class ListedKernel {
 public:
  ListedKernel(const ListedKernel&) = delete;
  ListedKernel& operator=(const ListedKernel&) = delete;

  // Loads all of them on the current device; see load_kernel().
  static void load_all() {
    for (const ListedKernel* kernel = last; kernel != nullptr; kernel = kernel->before_)
      load_kernel(kernel->handle);
  }

  const void* const handle;

 protected:
  explicit ListedKernel(const void* kernel) : handle(kernel), before_(last) { last = this; }

 private:
  const ListedKernel* before_;
  inline static const ListedKernel* last = nullptr;
};

// A kernel with one argument and no dynamic shared memory, as host code sees it: a constant, defined beside
// the kernel, which only its own source knows.
template <class Arguments>
class Kernel : public ListedKernel {
 public:
  // The blocks of a launch that may have at most `most`.
  using Blocks = std::int64_t (*)(const Arguments& arguments, int most);

  // `action`: for the error message. Without `blocks` the caller says how many a launch has.
  Kernel(void (*kernel)(Arguments), int threads, const char* action, Blocks blocks = nullptr)
      : ListedKernel(reinterpret_cast<const void*>(kernel)),
        threads_(threads),
        action_(action),
        blocks_(blocks) {}

  void operator()(const Arguments& arguments, LaunchShape shape, Stream stream) const {
    if (blocks_ != nullptr) shape.blocks = static_cast<int>(blocks_(arguments, shape.blocks));
    launch({handle, threads_, 0, action_}, &arguments, shape, handle_of(stream));
  }

 private:
  int threads_;
  const char* action_;
  Blocks blocks_;
};

}  // namespace ferry::cuda
