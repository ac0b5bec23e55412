// Device memory and graphs that tests own: each is freed with its C++ object.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "ferry/types.hpp"
#include "harness/guarded_buffer.hpp"
#include "harness/require_success.hpp"
#include "harness/test_stream.hpp"

namespace ferry::contract {

using device::require_success;

// Memory of the current device, filled with poison at first. Never synchronises with other streams: kernels
// of other ranks on the device may be waiting for this thread.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::int64_t bytes) : bytes_(bytes) {
    constexpr std::int64_t kMinBytes = 16;  // an address even for 0 bytes
    require_success(cudaMalloc(&data_, static_cast<std::size_t>(std::max(bytes, kMinBytes))), "cudaMalloc");
    poison(cudaStreamPerThread);
    require_success(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  }
  explicit DeviceBytes(const std::vector<std::byte>& values)
      : DeviceBytes(static_cast<std::int64_t>(values.size())) {
    // Not cudaMemcpy: it may return before the copy from pageable memory has reached the device, and other
    // streams would not wait for it.
    require_success(
        cudaMemcpyAsync(data_, values.data(), values.size(), cudaMemcpyHostToDevice, cudaStreamPerThread),
        "cudaMemcpyAsync");
    require_success(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(DeviceBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBytes& operator=(DeviceBytes&&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::int64_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

  void poison(cudaStream_t stream) const {
    const auto bytes = static_cast<std::size_t>(bytes_);
    require_success(cudaMemsetAsync(data_, std::to_integer<int>(kPoison), bytes, stream), "cudaMemsetAsync");
  }
  // Copies all of `from` to the start of this memory.
  void copy_from(const DeviceBytes& from, cudaStream_t stream) const {
    const auto bytes = static_cast<std::size_t>(from.bytes_);
    require_success(cudaMemcpyAsync(data_, from.data_, bytes, cudaMemcpyDeviceToDevice, stream),
                    "cudaMemcpyAsync");
  }
  std::vector<std::byte> to_host() const {
    std::vector<std::byte> values(static_cast<std::size_t>(bytes_));
    require_success(cudaMemcpy(values.data(), data_, values.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

class Graph {
 public:
  // Captures what `enqueue` puts on the stream, in global mode: until the capture ends, no other thread of
  // the process may allocate memory. The mutex serialises captures.
  template <class Enqueue>
  Graph(cudaStream_t stream, Enqueue enqueue) {
    static std::mutex capture_mutex;
    const std::lock_guard lock(capture_mutex);
    cudaGraph_t graph = nullptr;
    require_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    enqueue();
    require_success(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    require_success(status, "cudaGraphInstantiate");
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(cudaStream_t stream) const {
    require_success(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace ferry::contract
