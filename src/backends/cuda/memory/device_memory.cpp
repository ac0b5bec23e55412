#include "backends/cuda/memory/device_memory.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <vector>

#include "backends/cuda/memory/pointer_check.hpp"
#include "backends/cuda/runtime/driver.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

CUmemAllocationProp allocation_properties(int device, bool shared) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes =
      shared ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return properties;
}

void require(int device, CUdevice_attribute attribute, const char* feature) {
  int has = 0;
  check(driver().device_get_attribute(&has, attribute, handle_of(device)), "query a device's attributes");
  if (has == 0) throw UnsupportedError(str("device ", device, " does not support ", feature));
}

}  // namespace

std::int64_t Allocation::granularity(int device, bool shared) {
  require(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management");
  if (shared) {
    require(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            "sharing memory between processes by file descriptors");
  }
  const CUmemAllocationProp wanted = allocation_properties(device, shared);
  std::size_t bytes = 0;
  check(driver().mem_get_allocation_granularity(&bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "query the granularity of device memory");
  return static_cast<std::int64_t>(bytes);
}

Allocation Allocation::on_device(int device, std::int64_t bytes, bool shared) {
  const CUmemAllocationProp wanted = allocation_properties(device, shared);
  CUmemGenericAllocationHandle handle = 0;
  check(driver().mem_create(&handle, bytes, &wanted, 0),
        str("allocate ", counted(bytes, "byte"), " of memory on device ", device).c_str());
  return Allocation(handle);
}

Allocation Allocation::import_from(int rank, const FileDescriptor& descriptor) {
  // CUDA takes the descriptor's number in place of a pointer.
  void* number = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor.number()));
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result =
      driver().mem_import_from_shareable_handle(&handle, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  check(result, str("import the device memory of rank ", rank).c_str());
  return Allocation(handle);
}

Allocation::~Allocation() {
  if (handle_ != 0) driver().mem_release(handle_);
}

FileDescriptor Allocation::export_descriptor() const {
  int number = -1;
  check(
      driver().mem_export_to_shareable_handle(&number, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "export device memory");
  return FileDescriptor(number);
}

DeviceMapping::DeviceMapping(const Allocation& allocation, std::int64_t bytes, std::span<const int> devices)
    : bytes_(bytes) {
  try {
    check(driver().mem_address_reserve(&address_, bytes_, 0, 0, 0),
          str("reserve ", counted(bytes, "byte"), " of addresses").c_str());
    check(driver().mem_map(address_, bytes_, 0, allocation.handle(), 0), "map device memory");
    mapped_ = true;
    std::vector<CUmemAccessDesc> access(devices.size());
    for (std::size_t i = 0; i < devices.size(); ++i) {
      access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access[i].location.id = devices[i];
      access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    check(driver().mem_set_access(address_, bytes_, access.data(), access.size()),
          "give devices access to memory");
  } catch (...) {
    unmap();  // no destructor runs for a constructor that throws
    throw;
  }
}

DeviceMapping::~DeviceMapping() {
  unmap();
}

void DeviceMapping::unmap() noexcept {
  if (mapped_) driver().mem_unmap(address_, bytes_);
  if (address_ != 0) driver().mem_address_free(address_, bytes_);
}

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

MemoryFound find_memory(const void* address, int device) {
  CUmemorytype type{};  // stays 0 for an address that the driver does not know
  int owner = -1;
  std::array attributes = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  std::array<void*, attributes.size()> values = {&type, &owner};
  // Several attributes at once, because this function does not fail for an address that the driver does not
  // know.
  check(driver().pointer_get_attributes(static_cast<unsigned>(attributes.size()), attributes.data(),
                                        values.data(), reinterpret_cast<CUdeviceptr>(address)),
        "find out where an argument lies");
  // Managed memory may be reported as unified.
  if (type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_UNIFIED)
    return {MemoryFound::Kind::pinned, -1, true};
  if (type != CU_MEMORYTYPE_DEVICE) return {MemoryFound::Kind::pageable, -1, false};
  if (owner == device) return {MemoryFound::Kind::device, owner, true};
  int accessible = 0;
  check(cudaDeviceCanAccessPeer(&accessible, device, owner), "query peer access");
  return {MemoryFound::Kind::device, owner, accessible != 0};
}

}  // namespace ferry::cuda
