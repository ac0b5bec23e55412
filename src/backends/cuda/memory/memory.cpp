#include "backends/cuda/memory/memory.hpp"

#include <cuda_runtime_api.h>

#include <cstring>

#include "backends/cuda/host/current_device.hpp"
#include "backends/cuda/host/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

namespace {

// A stream that waits for no other, not even the default one: a peer's kernel on the same device may be
// running there, waiting for this rank.
class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create a stream"); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace

void zero(void* memory, std::int64_t bytes) {
  const OwnStream stream;
  check(cudaMemsetAsync(memory, 0, bytes, stream.get()), "zero device memory");
  check(cudaStreamSynchronize(stream.get()), "zero device memory");
}

// Delegating, so that the destructor frees what there is when a line throws.
DeviceMemory::DeviceMemory(std::int64_t bytes) : DeviceMemory() {
  check(cudaGetDevice(&device_), "tell the current device");
  if (bytes == 0) return;
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), str("get ", bytes, " bytes of memory on device ", device_).c_str());
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  zero(data, bytes);
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  const OnDevice on_device(device_);
  cudaFree(data_);
}

PinnedMemory::PinnedMemory(std::int64_t bytes) : PinnedMemory() {
  if (bytes == 0) return;
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
        str("get ", bytes, " bytes of pinned memory").c_str());
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  void* on_device = nullptr;
  check(cudaHostGetDevicePointer(&on_device, data, 0), "map pinned memory to the device");
  if (on_device != data) throw UnsupportedError("host and device have no common addresses on this machine");
  std::memset(data, 0, bytes);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

}  // namespace ferry::cuda
