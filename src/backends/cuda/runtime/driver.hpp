// Functions of the CUDA driver that the runtime does not offer, loaded at run time.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

namespace ferry::cuda {

// Loaded at run time, so that a program linked with Ferry also starts on a machine without a CUDA driver.
struct Driver {
  PFN_cuGetErrorName_v6000 get_error_name;
  PFN_cuGetErrorString_v6000 get_error_string;
  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuDeviceGetUuid_v11040 device_get_uuid;
  PFN_cuPointerGetAttributes_v7000 pointer_get_attributes;
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
  PFN_cuMemsetD32Async_v3020 memset_d32_async;
};

// Loaded by the first call; thread-safe. Throws UnsupportedError, with the remedy, if the driver is missing
// or too old.
const Driver& driver();

// The driver's handle of a device of the runtime. The runtime must be initialised. Throws SystemError.
CUdevice handle_of(int device);

}  // namespace ferry::cuda
