// DLPack's table of C functions, of its version 1.3: what a framework that has one is asked without a line of
// Python in between. The table's own header is not everywhere, so its layout is written down here.
#pragma once

#include <cstdint>

#include "arrays/array.hpp"

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

struct DlpackExchange {
  DlpackVersion version;
  DlpackExchange* previous;
  int (*allocate)(DlpackTensor* like, ManagedTensor** made, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*managed_of_object)(void* object, ManagedTensor** made);
  int (*object_of_managed)(ManagedTensor* taken, void** object);
  int (*look)(void* object, DlpackTensor* found);  // may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

}  // namespace ferry::python
