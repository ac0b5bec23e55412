#include "backends/cuda/host/lane_streams.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "base/text.hpp"

namespace ferry::cuda {
namespace {

StreamIdentity identity_of(cudaStream_t stream, int device) {
  if (stream == nullptr || stream == cudaStreamLegacy) return {device, nullptr, true};
  if (stream == cudaStreamPerThread) {
    thread_local const char thread = 0;  // its address stands for the thread's stream
    return {device, &thread, true};
  }
  unsigned flags = 0;
  check(cudaStreamGetFlags(stream, &flags), "query a stream's flags");
  return {device, stream, (flags & cudaStreamNonBlocking) == 0};
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  // Fails for the legacy default stream while another stream of the device is captured.
  const cudaError_t result = cudaStreamIsCapturing(stream, &status);
  if (result == cudaErrorStreamCaptureImplicit) {
    cudaGetLastError();
    return true;
  }
  check(result, "find out whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

int LaneStreams::other_rank_on(Stream stream, std::uint64_t number) {
  if (exchange_ == nullptr || captured_) return -1;
  const cudaStream_t handle = handle_of(stream);
  captured_ = is_captured(handle);
  if (captured_) return -1;
  return StreamRegistry::of_process().record(exchange_, lane_, rank_, number, identity_of(handle, device_));
}

void LaneStreams::require_own(Operation operation, Stream stream, std::uint64_t number) {
  const int other = other_rank_on(stream, number);
  if (other < 0) return;
  throw UsageError(
      str(to_string(operation), " ", number, ": ranks ", other, " and ", rank_,
          " of this process pass the same stream of device ", device_,
          ", or streams of which one waits for the other, so their kernels would wait for each other: "
          "create a non-blocking stream for each rank"));
}

}  // namespace ferry::cuda
