#include "backends/cuda/memory/pointer_check.hpp"

#include <cuda_runtime_api.h>

#include <array>

#include "backends/cuda/runtime/driver.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

bool aligned(const CallPointer& pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer.address) % static_cast<std::uintptr_t>(pointer.alignment) ==
         0;
}

}  // namespace

void PointerCheck::require_usable(const char* operation, std::span<const CallPointer> pointers) {
  for (const CallPointer& pointer : pointers) {
    const auto [name, address, alignment] = pointer;
    const auto refuse = [&](const auto&... why) {
      throw UsageError(str(operation, ": ", name, ": ", address, where_, why...));
    };
    if (!aligned(pointer)) refuse(" is not a multiple of ", alignment, ": pass an aligned address");
    // Addresses differ above the lowest four bits: arrays are aligned to 16 bytes or more, in practice to
    // 512.
    const auto bits = reinterpret_cast<std::uintptr_t>(address);
    const void*& accepted = accepted_[(bits >> 4 ^ bits >> 9 ^ bits >> 15 ^ bits >> 21) % accepted_.size()];
    if (accepted == address) continue;
    const MemoryFound found = query_(address);
    if (found.kind == MemoryFound::Kind::pageable) {
      refuse(" is pageable host memory, or no memory, which device ", device_,
             " cannot access: pass device memory or pinned host memory");
    }
    if (!found.accessible) {
      refuse(" is memory of device ", found.device, ", which device ", device_,
             " of this call cannot access: pass memory of device ", device_);
    }
    accepted = address;
  }
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
