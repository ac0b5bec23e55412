#include "backends/cuda/memory/device_memory.hpp"

#include <cuda_runtime_api.h>

#include <cstring>

#include "backends/cuda/runtime/copy_stream.hpp"
#include "backends/cuda/runtime/current_device.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

void zero(void* memory, std::int64_t bytes) {
  const cudaStream_t stream = copy_stream();
  check(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), stream), "zero device memory");
  check(cudaStreamSynchronize(stream), "wait for a stream");
}

// Delegates, so that the destructor runs and frees the memory if the body throws.
DeviceMemory::DeviceMemory(std::int64_t bytes) : DeviceMemory() {
  check(cudaGetDevice(&device_), "find the current device");
  if (bytes == 0) return;
  void* data = nullptr;
  check(cudaMalloc(&data, bytes),
        str("allocate ", counted(bytes, "byte"), " of memory on device ", device_).c_str());
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  zero(data, bytes);
}

DeviceMemory DeviceMemory::exportable(std::int64_t bytes) {
  DeviceMemory memory;
  check(cudaGetDevice(&memory.device_), "find the current device");
  if (bytes == 0) return memory;
  const std::int64_t unit = Allocation::granularity(memory.device_, true),
                     mapped = (bytes + unit - 1) / unit * unit;
  const Allocation allocation = Allocation::on_device(memory.device_, mapped, true);
  const int devices[] = {memory.device_};
  memory.mapping_ = std::make_unique<DeviceMapping>(allocation, mapped, devices);
  memory.data_ = memory.mapping_->data();
  memory.bytes_ = bytes;
  zero(memory.data_, bytes);
  return memory;
}

void DeviceMemory::abandon() noexcept {
  data_ = nullptr;
  mapping_.release();  // NOLINT(bugprone-unused-return-value): it stays mapped
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  const ScopedDevice device(device_);
  if (mapping_ == nullptr) {
    cudaFree(data_);
    return;
  }
  cudaDeviceSynchronize();
  mapping_.reset();
}

PinnedMemory::PinnedMemory(std::int64_t bytes) : PinnedMemory() {
  if (bytes == 0) return;
  void* data = nullptr;
  check(cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
        str("allocate ", counted(bytes, "byte"), " of pinned memory").c_str());
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  void* on_device = nullptr;
  check(cudaHostGetDevicePointer(&on_device, data, 0), "map pinned memory to the device");
  if (on_device != data)
    throw UnsupportedError(
        "pinned memory has different addresses on host and device on this machine; the cuda backend needs "
        "unified "
        "addressing");
  std::memset(data, 0, bytes);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

}  // namespace ferry::cuda
