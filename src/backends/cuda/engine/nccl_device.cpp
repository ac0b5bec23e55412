#include "backends/cuda/engine/nccl_device.hpp"

#include <cstring>

#include "backends/collective/window_communicator.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/memory/symmetric.hpp"
#include "backends/cuda/runtime/stream.hpp"

namespace ferry::cuda {
namespace {

class CudaDeviceStream final : public DeviceStream {
 public:
  CudaDeviceStream() { check(cudaGetDevice(&device_), "find the current device"); }

  void* handle() const override { return stream_.get(); }

  std::byte* memory(std::int64_t bytes) override {
    const ScopedDevice device(device_);
    if (memory_.bytes() < bytes) memory_ = DeviceMemory(bytes);
    return memory_.data();
  }
  void copy(void* to, const void* from, std::int64_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream_.get()),
          "copy for NCCL");
  }
  void wait(const std::function<void()>& check_wait) override {
    done_.record(stream_.get());
    done_.wait(check_wait);
  }

 private:
  int device_ = 0;
  CudaStream stream_;
  CudaEvent done_;
  DeviceMemory memory_;
};

}  // namespace

DeviceAccess access_current_device(const Rank& rank) {
  int device = 0;
  check(cudaGetDevice(&device), "find the current device");
  return {.id = id_of_current_device(),
          .make_stream = [] { return std::make_unique<CudaDeviceStream>(); },
          .select = [device] { check(cudaSetDevice(device), "select a device"); },
          .make_host_link = [rank] { return collective::make_header_link(rank); }};
}

}  // namespace ferry::cuda
