#include "backends/cuda/memory/device_access.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/host/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

void require_reachable(const char* what, const void* pointer, int device) {
  if (pointer == nullptr) return;
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, pointer), "look at the caller's memory");
  if (found.type == cudaMemoryTypeUnregistered) {
    throw UsageError(str(what, ": ", pointer, " is host memory that devices do not reach; device ", device,
                         " needs device memory or pinned host memory"));
  }
  if (found.type != cudaMemoryTypeDevice || found.device == device) return;
  int reaches = 0;
  check(cudaDeviceCanAccessPeer(&reaches, device, found.device), "compare devices");
  if (reaches == 0) {
    throw UsageError(str(what, ": ", pointer, " lies on device ", found.device,
                         ", the exchange works on device ", device, ", which cannot access it"));
  }
}

}  // namespace ferry::cuda
