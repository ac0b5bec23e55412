#include "deep_ep/arguments.hpp"

#include <limits>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

void require_torch_or_numpy(Framework framework, const char* name) {
  if (framework == Framework::torch || framework == Framework::numpy) return;
  throw UsageError(str(name, ": expected an array of PyTorch or NumPy, got one of ", to_string(framework)));
}

Array inspect_matrix(const nb::object& object, const char* name) {
  Array found = inspect(object, name);
  require_torch_or_numpy(found.framework, name);
  if (found.shape.size() == 2) return found;
  throw UsageError(str(name, ": expected 2 dimensions, got shape ", shape_text(found.shape)));
}

nb::object dense_array(const nb::object& array, const Array& found) {
  if (is_dense(found)) return array;
  if (found.framework == Framework::torch) return array.attr("contiguous")();
  static CachedAttribute contiguous;
  return contiguous.get("numpy", "ascontiguousarray")(array);
}

int positive_integer(const nb::object& number, const char* name) {
  constexpr long long kMost = std::numeric_limits<std::int32_t>::max();
  if (!PyBool_Check(number.ptr()) && PyIndex_Check(number.ptr()) != 0) {
    const long long value = PyLong_AsLongLong(number.ptr());
    if (value >= 1 && value <= kMost) return static_cast<int>(value);
    PyErr_Clear();
  }
  throw UsageError(str(name, ": expected an integer from 1 to ", kMost, ", got ",
                       nb::cast<std::string>(nb::repr(number))));
}

void refuse_hook_with_event(bool async_finish, bool hooked) {
  if (async_finish && hooked) throw UsageError("async_finish and return_recv_hook exclude each other");
}

}  // namespace ferry::python
