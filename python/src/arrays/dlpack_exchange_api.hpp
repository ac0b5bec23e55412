// DLPackExchangeAPI, the table of C functions of DLPack 1.3 that reads and makes a
// framework's tensors without running Python code. DLPack's own header is not installed
// everywhere, so its layout is declared here.
#pragma once

#include <cstdint>

#include "array.hpp"

namespace ferry::python {

struct DlpackVersion {
  std::uint32_t major = 0, minor = 0;
};

using DlpackTensor = nb::dlpack::dltensor;

struct ManagedTensor {
  DlpackVersion version;
  void* context;
  void (*destroy)(ManagedTensor*);
  std::uint64_t flags;
  DlpackTensor tensor;
};

// Functions return 0 on success, else -1 with a Python error set.
struct DlpackExchangeApi {
  DlpackVersion version;
  DlpackExchangeApi* previous;
  int (*managed_tensor_allocator)(DlpackTensor* prototype, ManagedTensor** out, void* context,
                                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*managed_tensor_from_object)(void* object, ManagedTensor** out);
  int (*managed_tensor_to_object)(ManagedTensor* tensor, void** out);
  int (*tensor_from_object)(void* object, DlpackTensor* out);  // may be null
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};

}  // namespace ferry::python
