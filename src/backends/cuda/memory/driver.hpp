// The functions of the CUDA driver that the runtime does not offer.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

namespace ferry::cuda {

// Found in the driver of this machine at run time, so that a program with Ferry in it starts without one.
struct Driver {
  PFN_cuGetErrorName_v6000 get_error_name;
  PFN_cuGetErrorString_v6000 get_error_string;
  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuDeviceGetUuid_v11040 device_get_uuid;
  PFN_cuMemGetAllocationGranularity_v10020 mem_get_allocation_granularity;
  PFN_cuMemCreate_v10020 mem_create;
  PFN_cuMemRelease_v10020 mem_release;
  PFN_cuMemExportToShareableHandle_v10020 mem_export_to_shareable_handle;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import_from_shareable_handle;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve;
  PFN_cuMemAddressFree_v10020 mem_address_free;
  PFN_cuMemMap_v10020 mem_map;
  PFN_cuMemUnmap_v10020 mem_unmap;
  PFN_cuMemSetAccess_v10020 mem_set_access;
};

// One for the process, filled by the first call; any thread. UnsupportedError if there is no driver, or one
// that lacks a function, with what to do about it.
const Driver& driver();

// The driver's own name for a device of the runtime, which has started by then. SystemError.
CUdevice handle_of(int device);

}  // namespace ferry::cuda
