// Device memory, streams and graphs of the tests of this folder, each freed by its object.
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

// Poisoned at first, on the current device. Nothing here waits for other streams: kernels of other ranks on
// the card may wait for this thread.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::int64_t bytes) : bytes_(bytes) {
    constexpr std::int64_t kLeast = 16;  // an address, also without bytes
    require_success(cudaMalloc(&data_, static_cast<std::size_t>(std::max(bytes, kLeast))), "cudaMalloc");
    poison(cudaStreamPerThread);
    require_success(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
  }
  explicit DeviceBytes(const std::vector<std::byte>& values)
      : DeviceBytes(static_cast<std::int64_t>(values.size())) {
    // cudaMemcpy may return while the last piece is on its way, and other streams would not wait for it.
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
  // The start of this memory becomes what `from` holds.
  void take(const DeviceBytes& from, cudaStream_t stream) const {
    const auto bytes = static_cast<std::size_t>(from.bytes_);
    require_success(cudaMemcpyAsync(data_, from.data_, bytes, cudaMemcpyDeviceToDevice, stream),
                    "cudaMemcpyAsync");
  }
  std::vector<std::byte> on_host() const {
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
  // Captures what `enqueue` puts on the stream, in global mode: meanwhile no thread of the process may
  // allocate, nor make a graph of its own.
  template <class Enqueue>
  Graph(cudaStream_t stream, Enqueue enqueue) {
    static std::mutex one_at_a_time;
    const std::lock_guard alone(one_at_a_time);
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
