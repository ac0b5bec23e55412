// PyTorch. Attributes are read one by one: its __dlpack__ is written in Python and takes longer than a whole
// call may.
#include <nanobind/stl/string.h>

#include "core/text.hpp"
#include "ferry/error.hpp"
#include "framework.hpp"

namespace ferry::python {
namespace {

Element element_of_torch(nb::handle type) {
  // torch's types are objects that live as long as the process: "torch.bfloat16" is read once for each.
  static std::vector<std::pair<PyObject*, Element>> known;
  for (const auto& [object, element] : known) {
    if (object == type.ptr()) return element;
  }
  const auto name = nb::cast<std::string>(nb::str(type));
  const Element element = element_named(name.substr(name.find('.') + 1));
  known.emplace_back(type.ptr(), element);
  return element;
}

Device place_of_torch(nb::handle device) {
  const nb::object type = device.attr("type");
  if (PyUnicode_CompareWithASCIIString(type.ptr(), "cuda") == 0) {
    const nb::object index = device.attr("index");
    return {nb::device::cuda::value, index.is_none() ? 0 : nb::cast<int>(index)};
  }
  if (PyUnicode_CompareWithASCIIString(type.ptr(), "cpu") == 0) return kHost;
  return {-1, 0};
}

void append(Shape& shape, nb::handle tuple) {
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    shape.push_back(nb::cast<std::int64_t>(nb::handle(PyTuple_GET_ITEM(tuple.ptr(), i))));
  }
}

bool gradients_are_recorded() {
  static Kept enabled;
  return nb::cast<bool>(enabled.of("torch", "is_grad_enabled")());
}

}  // namespace

std::optional<int> device_of_torch() {
  static Kept started, current;
  const nb::handle has_started = started.if_loaded("torch.cuda", "is_initialized");
  if (!has_started.is_valid() || !nb::cast<bool>(has_started())) return std::nullopt;
  return nb::cast<int>(current.of("torch.cuda", "current_device")());
}

Array look_at_torch(nb::handle object, const char* name) {
  Array found{.element = element_of_torch(object.attr("dtype")),
              .device = place_of_torch(object.attr("device")),
              .framework = Framework::torch,
              .owner = nb::borrow(object)};
  if (found.element.bits == 0 || found.device.device_type < 0) {
    throw UsageError(str(name, ": a tensor of ", nb::cast<std::string>(nb::str(object.attr("dtype"))), " on ",
                         nb::cast<std::string>(nb::str(object.attr("device"))), " is none Ferry carries"));
  }
  if (nb::cast<bool>(object.attr("requires_grad")) && gradients_are_recorded()) {
    throw UsageError(str(name,
                         ": requires a gradient, which an exchange does not record: use ferry.torch, "
                         "torch.no_grad(), or detach()"));
  }
  append(found.shape, object.attr("shape"));
  append(found.strides, object.attr("stride")());
  found.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")()));
  return found;
}

}  // namespace ferry::python
