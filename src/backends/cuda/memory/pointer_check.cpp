#include "backends/cuda/memory/pointer_check.hpp"

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

}  // namespace ferry::cuda
