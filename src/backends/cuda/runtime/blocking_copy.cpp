#include "backends/cuda/runtime/blocking_copy.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/copy_stream.hpp"
#include "backends/cuda/runtime/error.hpp"

namespace ferry::cuda {
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

}  // namespace ferry::cuda
