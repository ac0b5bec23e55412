#include "deep_ep/arguments.hpp"

#include "base/text.hpp"
#include "cast.hpp"
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

void require_whole_rows(const Array& x, const char* name) {
  const std::int64_t unit = 16 / x.element_bytes();
  if (x.shape[1] > 0 && x.shape[1] % unit == 0) return;
  throw UsageError(str(name, ": expected a hidden size that is a multiple of ", unit, ", so that rows of ",
                       name_of(x.element), " are multiples of 16 bytes, got shape ", shape_text(x.shape)));
}

void require_slots(const Array& ids) {
  if (ids.shape[1] >= 1 && ids.shape[1] <= kMaxTopK) return;
  throw UsageError(str("topk_idx: expected 1 to ", kMaxTopK, " columns, got shape ", shape_text(ids.shape)));
}

nb::object dense_array(const nb::object& array, const Array& found) {
  if (is_dense(found)) return array;
  if (found.framework == Framework::torch) return array.attr("contiguous")();
  static CachedAttribute contiguous;
  return contiguous.get("numpy", "ascontiguousarray")(array);
}

nb::object dense_array(const nb::object& array, const Array& found, Arguments& arguments) {
  if (!is_dense(found)) arguments.keep_original(array);
  return dense_array(array, found);
}

int integer_from(int least, const nb::object& number, const char* name, int most) {
  if (!PyBool_Check(number.ptr()) && PyIndex_Check(number.ptr()) != 0) {
    const nb::object index = nb::steal(PyNumber_Index(number.ptr()));
    const long long value = index.is_valid() ? PyLong_AsLongLong(index.ptr()) : -1;
    if (value >= least && value <= most) return static_cast<int>(value);
    clear_error();
  }
  throw UsageError(str(name, ": expected an integer from ", least, " to ", most, ", got ",
                       nb::cast<std::string>(nb::repr(number))));
}

bool is_true(const nb::object& flag) {
  const int truth = PyObject_IsTrue(flag.ptr());
  if (truth < 0) throw nb::python_error();
  return truth == 1;
}

nb::object item_of(const nb::object& index, Py_ssize_t count,
                   const std::function<nb::object(Py_ssize_t)>& element) {
  if (!PySlice_Check(index.ptr())) {
    const auto given = nb::cast<Py_ssize_t>(index), at = given < 0 ? given + count : given;
    if (at < 0 || at >= count)
      throw nb::index_error(str("handle: it has ", counted(count, "element")).c_str());
    return element(at);
  }
  Py_ssize_t start = 0, stop = 0, step = 0;
  if (PySlice_Unpack(index.ptr(), &start, &stop, &step) != 0) throw nb::python_error();
  const Py_ssize_t length = PySlice_AdjustIndices(count, &start, &stop, step);
  nb::list items;
  for (Py_ssize_t i = 0; i < length; ++i) items.append(element(start + i * step));
  return nb::tuple(items);
}

}  // namespace ferry::python
