#include "backends/cuda/runtime/error.hpp"

#include <cerrno>
#include <string>

#include "backends/cuda/runtime/driver.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

namespace {

std::string version_text(int version) {
  return str(version / 1000, ".", version % 1000 / 10);
}

// Which driver is missing or too old, and the remedy.
std::string driver_advice() {
  int driver_version = 0, runtime_version = 0;
  cudaDriverGetVersion(&driver_version);  // 0: no driver
  cudaRuntimeGetVersion(&runtime_version);
  if (driver_version == 0) {
    return "; this machine has no CUDA driver: install NVIDIA's driver for its GPU, or use the cpu backend";
  }
  return str("; the driver supports CUDA ", version_text(driver_version), ", this build of ferry needs CUDA ",
             version_text(runtime_version), ": update the driver, or build with an older toolkit");
}

// Driver and runtime use the same numbers for their errors, so one table serves both.
struct ErrorTraits {
  bool unsupported;
  std::string advice;
};

ErrorTraits traits_of(cudaError_t result) {
  switch (result) {
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorCallRequiresNewerDriver:
      return {true, driver_advice()};
    case cudaErrorNoDevice:
      return {true, "; no GPU is visible to this process: check nvidia-smi and CUDA_VISIBLE_DEVICES"};
    case cudaErrorNoKernelImageForDevice:
      return {true, "; this build of ferry has no code for this GPU: set CMAKE_CUDA_ARCHITECTURES"};
    case cudaErrorStubLibrary:
      return {true,
              "; the libcuda found first is the toolkit's stub, not the driver's: check LD_LIBRARY_PATH"};
    case cudaErrorNotSupported:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      return {true, ""};
    case cudaErrorInitializationError:
      return {false,
              "; CUDA does not survive a fork: start a group of processes before the first use of CUDA"};
    default:
      return {false, ""};
  }
}

[[noreturn]] void raise(cudaError_t result, const char* name, const char* text, const char* action) {
  const auto [unsupported, advice] = traits_of(result);
  const std::string message = str("cannot ", action, ": ", name, " (", text, ")", advice);
  if (unsupported) throw UnsupportedError(message);
  throw SystemError(message, result == cudaErrorMemoryAllocation ? ENOMEM : EIO);
}

}  // namespace

void check(cudaError_t result, const char* action) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that the next launch does not report it again
  raise(result, cudaGetErrorName(result), cudaGetErrorString(result), action);
}

void check(CUresult result, const char* action) {
  if (result == CUDA_SUCCESS) return;
  const char *name = "unknown", *text = "unknown error";
  driver().get_error_name(result, &name);
  driver().get_error_string(result, &text);
  raise(static_cast<cudaError_t>(result), name, text, action);
}

}  // namespace ferry::cuda
