// RAII owners of CUDA objects (memory, event, graph), and copies from the GPU to the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "ferry/exchange.hpp"

namespace ferry::app {

// Makes the rank's GPU the current one of the calling thread: rank modulo the number of GPUs.
void use_gpu_of_rank(int rank);

class GpuEvent {
 public:
  GpuEvent() { cuda::check(cudaEventCreate(&event_), "create an event"); }
  ~GpuEvent() { cudaEventDestroy(event_); }
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  void record(const cuda::CudaStream& stream) const { record(stream.get()); }
  void record(cudaStream_t stream) const { cuda::check(cudaEventRecord(event_, stream), "record an event"); }
  void wait() const { cuda::check(cudaEventSynchronize(event_), "wait for an event"); }
  double seconds_since(const GpuEvent& earlier) const {
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "read the time of events");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// An executable graph of the work that `enqueue` puts on the stream.
class GpuGraph {
 public:
  template <class Enqueue>
  GpuGraph(const cuda::CudaStream& stream, Enqueue enqueue) {
    cudaGraph_t graph = nullptr;
    cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture a graph");
    enqueue();
    cuda::check(cudaStreamEndCapture(stream.get(), &graph), "capture a graph");
    const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    cuda::check(status, "instantiate a graph");
  }
  ~GpuGraph() { cudaGraphExecDestroy(executable_); }
  GpuGraph(const GpuGraph&) = delete;
  GpuGraph& operator=(const GpuGraph&) = delete;

  void launch(const cuda::CudaStream& stream) const {
    cuda::check(cudaGraphLaunch(executable_, stream.get()), "launch a graph");
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// Copies `bytes` from device memory and returns when they are there. The work that writes them has ended.
inline void copy_to_host(void* host, const void* device, std::int64_t bytes) {
  cuda::check(cudaMemcpy(host, device, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost),
              "copy from a GPU");
}

// Memory of the GPU that is current at construction.
class GpuBuffer {
 public:
  GpuBuffer() = default;
  explicit GpuBuffer(std::int64_t bytes) : bytes_(bytes) {
    if (bytes > 0) cuda::check(cudaMalloc(&data_, static_cast<std::size_t>(bytes)), "allocate device memory");
  }
  // That holds one value.
  template <class T>
  static GpuBuffer of(const T& value) {
    GpuBuffer buffer(sizeof value);
    buffer.fill_from(&value, sizeof value);
    return buffer;
  }
  ~GpuBuffer() { cudaFree(data_); }
  GpuBuffer(GpuBuffer&& other) noexcept { swap(other); }
  GpuBuffer& operator=(GpuBuffer&& other) noexcept {
    swap(other);
    return *this;
  }

  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::int64_t bytes() const { return bytes_; }

  // Copies from host memory and returns when the bytes are there. Waits for no other stream, because a kernel
  // there may be waiting for the calling thread.
  void fill_from(const void* host, std::int64_t bytes) const {
    cuda::check(cudaMemcpy(data_, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice),
                "copy to a GPU");
    // cudaMemcpy from pageable memory may return before the last piece has reached the device.
    cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "copy to a GPU");
  }
  void fill(int value, const cuda::CudaStream& stream) const {
    cuda::check(cudaMemsetAsync(data_, value, static_cast<std::size_t>(bytes_), stream.get()),
                "fill device memory");
  }

 private:
  void swap(GpuBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// The base of RankStream that waits until the ranks before this one have their streams.
struct AwaitedTurn {
  explicit AwaitedTurn(const Rank& rank) {
    for (int turn = 0; turn < rank.index(); ++turn) rank.barrier();
  }
};

// A rank's stream. Its constructor is collective: the ranks make their streams one after the other, and use
// each once. A device takes work from several queues, and streams that follow one another have different
// ones. In two hops ranks that share a GPU need both (docs/backends.md).
class RankStream : AwaitedTurn, public cuda::CudaStream {
 public:
  explicit RankStream(const Rank& rank) : AwaitedTurn(rank) {
    GpuBuffer(1).fill(0, *this);
    synchronize();
    for (int turn = rank.index(); turn < rank.size(); ++turn) rank.barrier();
  }
};

// Copies of a GPU's dispatch results in host memory, where the checks read them.
class ResultOnHost {
 public:
  // Copies all of a completed dispatch's result, the plan included. Returns when done. The copy is valid
  // until the next call of either function.
  DispatchResult copy(const DispatchResult& received, const Config& config);

  // Leaves the parts and the plan in device memory.
  DispatchResult copy_row_positions(const DispatchResult& received, const Config& config);

 private:
  template <class T>
  void move_to_host(T*& pointer, std::int64_t count);
  void* copied(const void* device, std::int64_t bytes);

  std::vector<std::vector<std::byte>> copies_;
};

}  // namespace ferry::app
