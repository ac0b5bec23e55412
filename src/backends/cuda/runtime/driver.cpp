#include "backends/cuda/runtime/driver.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

namespace {

// `version`: of the toolkit that introduced this signature, as in the name of the pointer's type.
template <class Function>
void load_function(Function& function, const char* name, unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found),
        str("load ", name, " from the CUDA driver").c_str());
  if (found != cudaDriverEntryPointSuccess || address == nullptr) {
    throw UnsupportedError(str("the CUDA driver of this machine lacks ", name, " of CUDA ", version / 1000,
                               ".", version % 1000 / 10, ": update the driver"));
  }
  function = reinterpret_cast<Function>(address);
}

Driver load_driver() {
  Driver driver{};
  load_function(driver.get_error_name, "cuGetErrorName", 6000);
  load_function(driver.get_error_string, "cuGetErrorString", 6000);
  load_function(driver.device_get, "cuDeviceGet", 2000);
  load_function(driver.device_get_attribute, "cuDeviceGetAttribute", 2000);
  load_function(driver.device_get_uuid, "cuDeviceGetUuid", 11040);
  load_function(driver.pointer_get_attributes, "cuPointerGetAttributes", 7000);
  load_function(driver.mem_get_allocation_granularity, "cuMemGetAllocationGranularity", 10020);
  load_function(driver.mem_create, "cuMemCreate", 10020);
  load_function(driver.mem_release, "cuMemRelease", 10020);
  load_function(driver.mem_export_to_shareable_handle, "cuMemExportToShareableHandle", 10020);
  load_function(driver.mem_import_from_shareable_handle, "cuMemImportFromShareableHandle", 10020);
  load_function(driver.mem_address_reserve, "cuMemAddressReserve", 10020);
  load_function(driver.mem_address_free, "cuMemAddressFree", 10020);
  load_function(driver.mem_map, "cuMemMap", 10020);
  load_function(driver.mem_unmap, "cuMemUnmap", 10020);
  load_function(driver.mem_set_access, "cuMemSetAccess", 10020);
  load_function(driver.memset_d32_async, "cuMemsetD32Async", 3020);
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

CUdevice handle_of(int device) {
  CUdevice handle = -1;
  check(driver().device_get(&handle, device), "find a device");
  return handle;
}

}  // namespace ferry::cuda
