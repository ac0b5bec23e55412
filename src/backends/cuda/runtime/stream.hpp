// Streams and events of CUDA, and short copies that wait for no stream of the caller.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <thread>

#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/scoped_device.hpp"
#include "base/process.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {

// Owns a stream of the device that is current at construction. The stream is non-blocking: it does not wait
// for the default stream, where a peer's kernel on the same device may be waiting for this rank.
class CudaStream {
 public:
  CudaStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream"); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }

  // Blocks until the work enqueued so far is done.
  void synchronize() const { check(cudaStreamSynchronize(stream_), "wait for a stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// An owned event, without timing, of the device that is current at construction.
class CudaEvent {
 public:
  CudaEvent() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create an event"); }
  ~CudaEvent() { cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream) const { check(cudaEventRecord(event_, stream), "record an event"); }
  // Work that `stream` is given from now on waits for the work before the last record().
  void hold_back(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "make a stream wait for an event");
  }
  // Whether the work before the last record() is done. Throws SystemError if it failed.
  bool done() const {
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) return false;
    check(state, "wait for a kernel");
    return true;
  }
  // Blocks until done(), and calls `check`, which may throw, about every millisecond.
  void wait(const std::function<void()>& check) const {
    constexpr int kPolls = 1'000;
    for (int polls = 1; !done(); ++polls) {
      pause_processor();
      if (polls % kPolls != 0) continue;
      check();
      std::this_thread::yield();
    }
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// The stream of this process for short copies: of the current device, made at the first call and never
// destroyed. A process must not reset the device afterwards. It is non-blocking, for any thread, and never
// captured.
//
// One stream for all copies, because CUDA has few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), and every
// new stream takes one in turn. The first work of a stream whose queue another one has taken since, or of a
// stream that was never used, may end up behind a kernel that waits for another rank of this process
// (measured: docs/log/2026-11-26-gpu.md).
cudaStream_t copy_stream();

// Small copies between host and device that do not wait for the caller's streams.
// Copies in either direction, in copy_stream(), and returns when the copy is done. May be called while
// streams are captured, in any mode and by any thread, and does not become part of the capture. Throws
// SystemError.
void copy_blocking(void* to, const void* from, std::int64_t bytes);

// Rows of `row_bytes`, which begin every `stride` bytes.
struct RowsCopy {
  void* to;
  std::int64_t to_stride;
  const void* from;
  std::int64_t from_stride, row_bytes, rows;
};
// Enqueues the copy on `stream`.
void copy_rows(const RowsCopy& copy, Stream stream);

}  // namespace ferry::cuda
