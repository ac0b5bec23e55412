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
      str(name, ": expected an array of shape ", lengths, "], got ", shape_text(array.shape), hint));
}

bool is_empty(const Array& array) {
  return std::find(array.shape.begin(), array.shape.end(), 0) != array.shape.end();
}

// Null, or null plus the offset of a view: PyTorch reports that for storage that was freed. No
// mapping begins below 64 KiB.
bool is_near_null(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) < 65536;
}

constexpr const char* kMakeContiguous =
    "; numpy.ascontiguousarray() and Tensor.contiguous() make a contiguous copy";

std::string shape_and_strides(const Array& array) {
  return str("shape ", shape_text(array.shape), " with strides ", shape_text(array.strides),
             " (in elements)");
}

template <class Number>
Number* copy_numbers(const Array& array, std::size_t dimension, const Number* from, Number* to) {
  if (dimension == array.shape.size()) {
    *to = *from;
    return to + 1;
  }
  for (std::int64_t i = 0; i < array.shape[dimension]; ++i)
    to = copy_numbers(array, dimension + 1, from + i * array.strides[dimension], to);
  return to;
}

// A C-contiguous copy of an array in host memory, in memory of its own.
template <class Number>
Array host_copy(const Array& array) {
  Array copy = array;
  std::int64_t count = 1;
  for (std::size_t i = array.shape.size(); i-- > 0;) {
    copy.strides[i] = count;
    count *= array.shape[i];
  }
  auto memory = std::make_unique<Number[]>(static_cast<std::size_t>(count));
  copy_numbers(array, 0, static_cast<const Number*>(array.data), memory.get());
  copy.data = memory.get();
  copy.owner =
      nb::capsule(memory.get(), [](void* numbers) noexcept { delete[] static_cast<Number*>(numbers); });
  static_cast<void>(memory.release());
  copy.read_only = true;  // the caller's array would not see what is written
  return copy;
}

// Returns true if the dimensions from `first` on are C-contiguous.
bool is_dense_from(const Array& array, std::size_t first) {
  if (is_empty(array)) return true;
  std::int64_t step = 1;
  for (std::size_t i = array.shape.size(); i-- > first;) {
    if (array.shape[i] != 1 && array.strides[i] != step) return false;
    step *= array.shape[i];
  }
  return true;
}

void require_dense_of(const Array& array, const char* name, Element element, const Shape& shape,
                      const char* hint) {
  require_element(array, name, {element});
  require_shape(array, name, shape, hint);
  require_dense(array, name);
}

}  // namespace

// Operators resolve lazily negated or conjugated tensors as PyTorch's own do, on the stream that they work
// on. An exchange may work on another stream, so there the caller must.
Array Arguments::resolve_lazy_bits(nb::handle tensor, const char* name) const {
  if (gradients_ == Gradients::refused) {
    throw UsageError(
        str(name,
            ": its memory holds values that PyTorch negates or conjugates lazily: pass the tensor's "
            "resolve_neg() or resolve_conj()"));
  }
  Array resolved = inspect(tensor.attr("resolve_conj")().attr("resolve_neg")(), name);
  resolved.read_only = true;  // a copy: the tensor itself would not see what is written
  return resolved;
}

Array Arguments::checked(nb::handle object, const char* name) {
  Array array = inspect(object, name);
  if (array.framework == Framework::torch) {
    if (gradients_ == Gradients::refused) refuse_gradients(object, name);
    if (is_lazily_negated(object, array.element)) array = resolve_lazy_bits(object, name);
  }
  if (is_near_null(array.data) && !is_empty(array))
    throw UsageError(str(name, ": has no memory: its storage was freed or never allocated"));
  const bool reachable = is_host(device_) ? is_host(array.device)
                                          : array.device.device_type == device_.device_type &&
                                                array.device.device_id == device_.device_id;
  if (!reachable) {
    throw UsageError(str(name, ": expected an array on ", name_of(device_),
                         ", the exchange's device, got one on ", name_of(array.device)));
  }
  if (first_name_.empty()) {
    first_name_ = name;
    framework_ = array.framework;
  } else if (array.framework != framework_) {
    throw UsageError(str(name, ": an array of ", to_string(array.framework), ", but ", first_name_,
                         " is an array of ", to_string(framework_),
                         ": the arrays of a call must be of one framework"));
  }
  return array;
}

const Array& Arguments::keep(Array array) {
  arrays_.push_back(std::make_unique<const Array>(std::move(array)));
  return *arrays_.back();
}

const Array& Arguments::add(nb::handle object, const char* name) {
  return keep(checked(object, name));
}

bool Arguments::is_on_current_stream() const {
  return stream_.is_none() ||
         stream_of(stream_, framework_, device_).handle == stream_of(nb::none(), framework_, device_).handle;
}

const Array& Arguments::add_numbers(nb::handle object, const char* name) {
  Array array = checked(object, name);
  if (is_dense(array)) return keep(std::move(array));
  if (is_host(device_)) {
    if (array.element.bits == 32) return keep(host_copy<std::uint32_t>(array));
    if (array.element.bits == 64) return keep(host_copy<std::uint64_t>(array));
  } else if (array.framework == Framework::torch && is_on_current_stream()) {
    return keep(inspect(array.owner.attr("contiguous")(), name));
  }
  return keep(std::move(array));
}

const Array& Arguments::dense(nb::handle object, const char* name, Element element, const Shape& shape,
                              const char* hint) {
  const Array& array = add(object, name);
  require_dense_of(array, name, element, shape, hint);
  return array;
}

const Array& Arguments::numbers(nb::handle object, const char* name, Element element, const Shape& shape,
                                const char* hint) {
  const Array& array = add_numbers(object, name);
  require_dense_of(array, name, element, shape, hint);
  return array;
}

const Array& Arguments::one(nb::handle object, const char* name, Element element) {
  const Array& array = add(object, name);
  require_element(array, name, {element});
  if (!array.shape.empty()) require_shape(array, name, {1}, "");
  return array;
}

const Array& Arguments::rows(nb::handle object, const char* name, std::int64_t columns,
                             std::initializer_list<Element> elements) {
  const Array& array = add(object, name);
  require_element(array, name, elements);
  const std::size_t dimensions = array.shape.size();
  if (dimensions < 2 || dimensions > 3 || array.shape.back() != columns) {
    throw UsageError(str(name, ": expected rows of ", counted(columns, "column"), ", got shape ",
                         shape_text(array.shape)));
  }
  return array;
}

std::vector<nb::object> Arguments::owners() const {
  std::vector<nb::object> owners = originals_;
  for (const auto& array : arrays_) owners.push_back(array->owner);
  return owners;
}

void require_element(const Array& array, const char* name, std::initializer_list<Element> elements) {
  if (std::find(elements.begin(), elements.end(), array.element) != elements.end()) return;
  std::string names;
  for (const Element element : elements) names += str(names.empty() ? "" : " or ", name_of(element));
  throw UsageError(str(name, ": expected ", names, ", got ", name_of(array.element), ": convert it to ",
                       elements.size() == 1 ? names : "one of these"));
}

void require_writable(const Array& array, const char* name) {
  if (array.read_only) throw UsageError(str(name, ": is read-only, but the call writes to it"));
}

bool is_dense(const Array& array) {
  return is_dense_from(array, 0);
}

void require_dense(const Array& array, const char* name) {
  if (is_dense(array)) return;
  throw UsageError(
      str(name, ": expected a C-contiguous array, got ", shape_and_strides(array), kMakeContiguous));
}

StridedRows strided_rows(const Array& array, const char* name, std::size_t inner) {
  const std::size_t outer = array.shape.size() - inner;
  std::int64_t row = 1;
  for (std::size_t i = outer; i < array.shape.size(); ++i) row *= array.shape[i];
  const auto refuse = [&] {
    throw UsageError(str(name, ": expected rows that are contiguous and equally far apart, got ",
                         shape_and_strides(array), kMakeContiguous));
  };
  if (is_empty(array)) return {};
  if (!is_dense_from(array, outer)) refuse();
  StridedRows rows{.count = 1, .stride = 0};
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
