// Kernels that stand for other work on a device.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>

namespace ferry::contract {

// Enqueues a kernel that occupies all SMs of the current device except `left_free` for the given time.
void occupy_sms(cudaStream_t stream, int left_free, std::chrono::nanoseconds time);

// Enqueues a kernel that stores where there is no memory. The process can then no longer use the device.
void fail_device(cudaStream_t stream);

struct HeldKernelWords;

// A kernel that runs until the host releases it.
class HeldKernel {
 public:
  HeldKernel();
  ~HeldKernel();
  HeldKernel(const HeldKernel&) = delete;
  HeldKernel& operator=(const HeldKernel&) = delete;

  // Enqueues the kernel, of one block. It ends by itself after ten seconds. One at a time.
  void launch(cudaStream_t stream);
  // Whether it has started within this time.
  bool wait_until_it_runs(std::chrono::seconds most) const;
  bool runs() const;
  void release();

 private:
  volatile HeldKernelWords* words_ = nullptr;  // pinned
};

}  // namespace ferry::contract
