// Device memory, streams, events and graphs, each freed by its object.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "backends/cuda/host/error.hpp"
#include "ferry/types.hpp"

namespace ferry::app {

class DeviceStream {
 public:
  DeviceStream() {
    cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream");
  }
  ~DeviceStream() { cudaStreamDestroy(stream_); }
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }
  void wait() const { cuda::check(cudaStreamSynchronize(stream_), "wait for a stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class DeviceEvent {
 public:
  DeviceEvent() { cuda::check(cudaEventCreate(&event_), "create an event"); }
  ~DeviceEvent() { cudaEventDestroy(event_); }
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  void record(const DeviceStream& stream) const {
    cuda::check(cudaEventRecord(event_, stream.get()), "record an event");
  }
  void wait() const { cuda::check(cudaEventSynchronize(event_), "wait for an event"); }
  double seconds_since(const DeviceEvent& earlier) const {
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "read the time of events");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// What the calls of `enqueue` put on the stream.
class DeviceGraph {
 public:
  template <class Enqueue>
  DeviceGraph(const DeviceStream& stream, Enqueue enqueue) {
    cudaGraph_t graph = nullptr;
    cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture a graph");
    enqueue();
    cuda::check(cudaStreamEndCapture(stream.get(), &graph), "capture a graph");
    const cudaError_t made = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    cuda::check(made, "make a graph");
  }
  ~DeviceGraph() { cudaGraphExecDestroy(executable_); }
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  void launch(const DeviceStream& stream) const {
    cuda::check(cudaGraphLaunch(executable_, stream.get()), "launch a graph");
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// From the device's memory, for work that has ended. Returns when it is done.
inline void copy_to_host(void* host, const void* device, std::int64_t bytes) {
  cuda::check(cudaMemcpy(host, device, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost),
              "copy from a GPU");
}

// Of the current device.
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::int64_t bytes) : bytes_(bytes) {
    if (bytes > 0) cuda::check(cudaMalloc(&data_, static_cast<std::size_t>(bytes)), "allocate device memory");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(DeviceArray&& other) noexcept { swap(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    swap(other);
    return *this;
  }

  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::int64_t bytes() const { return bytes_; }
  // Returns when it is done. Neither waits for other streams: kernels there may wait for this thread.
  void fill_from(const void* host, std::int64_t bytes) const {
    cuda::check(cudaMemcpy(data_, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice),
                "copy to a GPU");
    // The copy itself may return while its last piece is on its way.
    cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "copy to a GPU");
  }
  void fill(int value, const DeviceStream& stream) const {
    cuda::check(cudaMemsetAsync(data_, value, static_cast<std::size_t>(bytes_), stream.get()),
                "fill device memory");
  }

 private:
  void swap(DeviceArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace ferry::app
