#include "backends/cuda/memory/device_access.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

void require_device_access(const char* name, const void* pointer, int device) {
  if (pointer == nullptr) return;
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, pointer), "find out where an argument lies");
  if (found.type == cudaMemoryTypeUnregistered) {
    throw UsageError(str(name, ": ", pointer, " is pageable host memory, which device ", device,
                         " cannot access; pass device memory or pinned host memory"));
  }
  if (found.type != cudaMemoryTypeDevice || found.device == device) return;
  int accessible = 0;
  check(cudaDeviceCanAccessPeer(&accessible, device, found.device), "query peer access");
  if (accessible == 0) {
    throw UsageError(str(name, ": ", pointer, " lies on device ", found.device,
                         "; the exchange runs on device ", device, ", which cannot access it"));
  }
}

}  // namespace ferry::cuda
