// An owned CUDA event, without timing.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <thread>

#include "backends/cuda/runtime/error.hpp"
#include "base/process.hpp"

namespace ferry::cuda {

// An event of the device that is current at construction.
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

}  // namespace ferry::cuda
