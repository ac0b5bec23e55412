// The frameworks that have been imported, and how each is asked for what DLPack does not tell.
#pragma once

#include <optional>

#include "array.hpp"

namespace ferry::python {

// A thing that is looked up once and then kept for the life of the process.
class Kept {
 public:
  // The attribute of a module that something has imported already; an invalid handle if nothing has.
  nb::handle if_loaded(const char* module, const char* attribute);
  // The attribute of a module that is imported if need be.
  nb::handle of(const char* module, const char* attribute);

 private:
  nb::handle found_;
};

Framework framework_of(nb::handle object);

// The thread's device as PyTorch has it, if PyTorch has started on devices.
std::optional<int> device_of_torch();

Element element_named(const std::string& name);  // {} for none

// The framework's own object for the type, such as torch.bfloat16; invalid if it has none.
nb::object type_object(Framework framework, Element element);

Array look_at_torch(nb::handle object, const char* name);
Array look_at_numpy(nb::handle object, const char* name);
Array look_at_cupy(nb::handle object, const char* name);
Array look_at_dlpack(nb::handle object, const char* name);

}  // namespace ferry::python
