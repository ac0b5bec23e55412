#include "backends/cuda/host/error.hpp"

#include <cerrno>
#include <string>

#include "backends/cuda/memory/driver.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

namespace {

std::string version_text(int version) {
  return str(version / 1000, ".", version % 1000 / 10);
}

// What is missing, and what to do about it.
std::string about_driver() {
  int driver_version = 0, runtime_version = 0;
  cudaDriverGetVersion(&driver_version);  // 0 where there is none
  cudaRuntimeGetVersion(&runtime_version);
  if (driver_version == 0) {
    return "; this machine has no CUDA driver: install NVIDIA's driver for its GPU, or use the cpu backend";
  }
  return str("; the driver is of CUDA ", version_text(driver_version), ", this build of ferry of CUDA ",
             version_text(runtime_version), ": update the driver, or build with an older toolkit");
}

// The driver and the runtime number their errors alike.
struct Traits {
  bool unsupported;
  std::string advice;
};

Traits known(cudaError_t result) {
  switch (result) {
    case cudaErrorInsufficientDriver:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorCallRequiresNewerDriver:
      return {true, about_driver()};
    case cudaErrorNoDevice:
      return {true, "; no GPU is visible to this process: look at nvidia-smi and CUDA_VISIBLE_DEVICES"};
    case cudaErrorNoKernelImageForDevice:
      return {true, "; this build of ferry is for other GPUs: see CMAKE_CUDA_ARCHITECTURES"};
    case cudaErrorStubLibrary:
      return {true, "; the libcuda found first is the toolkit's stub and not the driver's"};
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

[[noreturn]] void raise(cudaError_t result, const char* name, const char* text, const char* doing) {
  const auto [unsupported, advice] = known(result);
  const std::string message = str("cannot ", doing, ": ", name, " (", text, ")", advice);
  if (unsupported) throw UnsupportedError(message);
  throw SystemError(message, result == cudaErrorMemoryAllocation ? ENOMEM : EIO);
}

}  // namespace

void check(cudaError_t result, const char* doing) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // said here: the next launch is not to be blamed for it
  raise(result, cudaGetErrorName(result), cudaGetErrorString(result), doing);
}

void check(CUresult result, const char* doing) {
  if (result == CUDA_SUCCESS) return;
  const char *name = "unknown", *text = "unknown error";
  driver().get_error_name(result, &name);
  driver().get_error_string(result, &text);
  raise(static_cast<cudaError_t>(result), name, text, doing);
}

}  // namespace ferry::cuda
