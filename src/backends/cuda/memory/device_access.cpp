#include "backends/cuda/memory/device_access.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include "backends/cuda/runtime/driver.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

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
