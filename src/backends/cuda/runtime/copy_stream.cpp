#include "backends/cuda/runtime/copy_stream.hpp"

#include <map>
#include <mutex>

#include "backends/cuda/runtime/error.hpp"

namespace ferry::cuda {

cudaStream_t copy_stream() {
  // Never destroyed: the driver shuts down before static objects are.
  static auto* const streams = new std::map<int, cudaStream_t>;
  static std::mutex mutex;
  int device = 0;
  check(cudaGetDevice(&device), "find the current device");
  const std::lock_guard lock(mutex);
  cudaStream_t& stream = (*streams)[device];
  if (stream == nullptr) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "find the priorities of streams");
    // Copies are short, and ranks wait for them.
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "create a stream");
  }
  return stream;
}

}  // namespace ferry::cuda
