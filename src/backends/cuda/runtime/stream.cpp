#include "backends/cuda/runtime/stream.hpp"

#include <cuda_runtime_api.h>

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

namespace {

// Lets this thread use CUDA freely while a capture is under way: a call that a capture does not allow would
// invalidate the capture. Restores the thread's mode.
class AllowDuringCapture {
 public:
  AllowDuringCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "set a thread's capture mode"); }
  ~AllowDuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowDuringCapture(const AllowDuringCapture&) = delete;
  AllowDuringCapture& operator=(const AllowDuringCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace

void copy_blocking(void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0) return;
  const AllowDuringCapture allow;
  const cudaStream_t stream = copy_stream();
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream),
        "copy between host and device");
  check(cudaStreamSynchronize(stream), "wait for a stream");
}

void copy_rows(const RowsCopy& copy, Stream stream) {
  if (copy.rows == 0) return;
  const auto size = [](std::int64_t value) { return static_cast<std::size_t>(value); };
  check(cudaMemcpy2DAsync(copy.to, size(copy.to_stride), copy.from, size(copy.from_stride),
                          size(copy.row_bytes), size(copy.rows), cudaMemcpyDefault,
                          static_cast<cudaStream_t>(stream.handle)),
        "copy rows");
}

}  // namespace ferry::cuda
