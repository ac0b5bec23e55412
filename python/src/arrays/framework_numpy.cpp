// Reads arrays of NumPy, and of CuPy, which have the same attributes. DLPack there does not support the types
// of ml_dtypes, so this reads the arrays' own attributes.

#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "casters.hpp"
#include "ferry/error.hpp"

namespace ferry::python {
namespace {

// Converts strides in bytes to elements.
void set_strides(Array& found, const std::vector<std::int64_t>& bytes, const char* name) {
  for (const std::int64_t stride : bytes) {
    if (stride % found.element_bytes() != 0) {
      throw UsageError(str(name, ": a stride of ", counted(stride, "byte"), " is not a multiple of the ",
                           counted(found.element_bytes(), "byte"), " of ", name_of(found.element)));
    }
    found.strides.push_back(stride / found.element_bytes());
  }
}

std::vector<std::int64_t> numbers(nb::handle tuple) {
  std::vector<std::int64_t> values;
  for (nb::handle value : tuple) values.push_back(nb::cast<std::int64_t>(value));
  return values;
}

Array inspect_common(nb::handle object, const char* name, Framework framework) {
  const nb::object type = object.attr("dtype");
  Array found{.element = element_named(nb::cast<std::string>(type.attr("name"))),
              .shape = numbers(object.attr("shape")),
              .framework = framework,
              .owner = nb::borrow(object)};
  if (found.element.bits == 0 || nb::cast<std::string>(type.attr("byteorder")) == ">") {
    throw UsageError(str(name, ": the type ", nb::cast<std::string>(nb::str(type)), " is not supported"));
  }
  set_strides(found, numbers(object.attr("strides")), name);
  return found;
}

}  // namespace

Array inspect_numpy(nb::handle object, const char* name) {
  Array found = inspect_common(object, name, Framework::numpy);
  const nb::object interface = object.attr("__array_interface__");
  const nb::object data = interface["data"];
  found.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(data[0]));
  found.read_only = nb::cast<bool>(data[1]);
  return found;
}

Array inspect_cupy(nb::handle object, const char* name) {
  Array found = inspect_common(object, name, Framework::cupy);
  found.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data").attr("ptr")));
  found.device = {nb::device::cuda::value, nb::cast<int>(object.attr("device").attr("id"))};
  return found;
}

}  // namespace ferry::python
