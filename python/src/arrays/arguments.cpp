#include "arrays/arguments.hpp"

#include <algorithm>

#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::python {
namespace {

void require_shape(const Array& array, const char* name, const Shape& expected, const char* hint) {
  bool same = array.shape.size() == expected.size();
  for (std::size_t i = 0; same && i < expected.size(); ++i)
    same = expected[i] < 0 || expected[i] == array.shape[i];
  if (same) return;
  std::string lengths;
  for (const std::int64_t length : expected)
    lengths += str(lengths.empty() ? "[" : ", ", length < 0 ? "any" : std::to_string(length));
  throw UsageError(
      str(name, ": expected an array of shape ", lengths, "], got ", text_of(array.shape), hint));
}

void require_element(const Array& array, const char* name, std::initializer_list<Element> elements) {
  if (std::find(elements.begin(), elements.end(), array.element) != elements.end()) return;
  std::string names;
  for (const Element element : elements) names += str(names.empty() ? "" : " or ", name_of(element));
  throw UsageError(str(name, ": expected ", names, ", got ", name_of(array.element)));
}

bool is_empty(const Array& array) {
  return std::find(array.shape.begin(), array.shape.end(), 0) != array.shape.end();
}

// Null, or as far from it as a view begins in storage that was given back: nobody has memory there.
bool is_nowhere(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) < 65536;
}

// Whether nothing lies between the elements of the dimensions from `first` on.
bool is_dense_from(const Array& array, std::size_t first) {
  if (is_empty(array)) return true;
  std::int64_t step = 1;
  for (std::size_t i = array.shape.size(); i-- > first;) {
    if (array.shape[i] != 1 && array.strides[i] != step) return false;
    step *= array.shape[i];
  }
  return true;
}

}  // namespace

// Of what operators are given, as PyTorch's own do: in order on the stream that they work on. An exchange may
// work on another one.
Array Arguments::without_lazy_bits(nb::handle tensor, const char* name) const {
  if (gradients_ == Gradients::refused) {
    throw UsageError(str(name,
                         ": PyTorch has yet to negate or conjugate what is in its memory: give "
                         "resolve_neg() or resolve_conj() of it"));
  }
  Array resolved = look_at(tensor.attr("resolve_conj")().attr("resolve_neg")(), name);
  resolved.read_only = true;  // the tensor itself would see nothing of what is written
  return resolved;
}

const Array& Arguments::take(nb::handle object, const char* name) {
  Array array = look_at(object, name);
  if (array.framework == Framework::torch) {
    if (gradients_ == Gradients::refused) refuse_gradients(object, name);
    if (is_lazily_negated(object, array.element)) array = without_lazy_bits(object, name);
  }
  if (is_nowhere(array.data) && !is_empty(array))
    throw UsageError(str(name, ": has no memory: its storage was given back, or never made"));
  const bool reachable = is_host(where_) ? is_host(array.device)
                                         : array.device.device_type == where_.device_type &&
                                               array.device.device_id == where_.device_id;
  if (!reachable) {
    throw UsageError(str(name, ": expected an array on ", name_of(where_),
                         ", where the exchange works, got one on ", name_of(array.device)));
  }
  if (first_ == nullptr) {
    first_ = name;
    framework_ = array.framework;
  } else if (array.framework != framework_) {
    throw UsageError(str(name, ": an array of ", to_string(array.framework), ", but ", first_, " is one of ",
                         to_string(framework_), ": a call takes arrays of one framework"));
  }
  taken_.push_back(std::make_unique<const Array>(std::move(array)));
  return *taken_.back();
}

const Array& Arguments::dense(nb::handle object, const char* name, Element element, const Shape& shape,
                              const char* hint) {
  const Array& array = take(object, name);
  require_element(array, name, {element});
  require_shape(array, name, shape, hint);
  require_dense(array, name);
  return array;
}

const Array& Arguments::rows(nb::handle object, const char* name, std::int64_t columns,
                             std::initializer_list<Element> elements) {
  const Array& array = take(object, name);
  require_element(array, name, elements);
  const std::size_t dimensions = array.shape.size();
  if (dimensions < 2 || dimensions > 3 || array.shape.back() != columns) {
    throw UsageError(str(name, ": expected rows of ", columns, " columns, got shape ", text_of(array.shape)));
  }
  return array;
}

std::vector<nb::object> Arguments::owners() const {
  std::vector<nb::object> owners;
  for (const auto& array : taken_) owners.push_back(array->owner);
  return owners;
}

void require_writable(const Array& array, const char* name) {
  if (array.read_only) throw UsageError(str(name, ": is read-only, and results are to be written to it"));
}

void require_dense(const Array& array, const char* name) {
  if (is_dense_from(array, 0)) return;
  throw UsageError(str(name, ": expected a C-contiguous array, got shape ", text_of(array.shape),
                       " with strides ", text_of(array.strides), " (in elements)"));
}

RowsOf rows_of(const Array& array, const char* name, std::size_t inner) {
  const std::size_t outer = array.shape.size() - inner;
  std::int64_t row = 1;
  for (std::size_t i = outer; i < array.shape.size(); ++i) row *= array.shape[i];
  const auto refuse = [&] {
    throw UsageError(
        str(name, ": expected rows with nothing between the elements of one, equally far apart, got shape ",
            text_of(array.shape), " with strides ", text_of(array.strides), " (in elements)"));
  };
  if (is_empty(array)) return {};
  if (!is_dense_from(array, outer)) refuse();
  RowsOf rows{.count = 1, .stride = 0};
  std::int64_t step = 0;  // from row to row, in elements; 0 while there is one row
  for (std::size_t i = outer; i-- > 0;) {
    const std::int64_t length = array.shape[i];
    if (length > 1 && step == 0) {
      step = array.strides[i];
      if (rows.count > 1 || step < row) refuse();
    } else if (length > 1 && array.strides[i] != step * rows.count) {
      refuse();
    }
    rows.count *= length;
  }
  rows.stride = step == row ? 0 : step * array.element_bytes();
  return rows;
}

}  // namespace ferry::python
