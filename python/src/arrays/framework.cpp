// Arrays of every framework but PyTorch: their names, what they are, and new ones.
#include "arrays/framework.hpp"

#include <algorithm>

#include "arrays/array.hpp"
#include "base/text.hpp"
#include "cast.hpp"
#include "casters.hpp"
#include "errors.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

namespace {

struct ElementName {
  Element element;
  const char* name;
};

constexpr ElementName kElementNames[] = {{kBf16, "bfloat16"},
                                         {kFp16, "float16"},
                                         {kFp32, "float32"},
                                         {{2, 64, 1}, "float64"},
                                         {kFp8, "float8_e4m3fn"},
                                         {{12, 8, 1}, "float8_e5m2"},
                                         {{0, 8, 1}, "int8"},
                                         {{0, 16, 1}, "int16"},
                                         {kInt32, "int32"},
                                         {kInt64, "int64"},
                                         {kByte, "uint8"},
                                         {{1, 16, 1}, "uint16"},
                                         {{1, 32, 1}, "uint32"},
                                         {{1, 64, 1}, "uint64"},
                                         {kBool, "bool"},
                                         {{5, 64, 1}, "complex64"},
                                         {{14, 8, 1}, "float8_e8m0fnu"}};

}  // namespace

std::string name_of(Element element) {
  for (const ElementName& known : kElementNames) {
    if (known.element == element) return known.name;
  }
  return str("DLPack type (", int{element.code}, ", ", int{element.bits}, " bits, ",
             counted(element.lanes, "lane"), ")");
}

bool is_named(Element element) {
  return std::ranges::any_of(kElementNames,
                             [element](const ElementName& known) { return known.element == element; });
}

Element element_named(const std::string& name) {
  for (const ElementName& known : kElementNames) {
    if (name == known.name) return known.element;
  }
  return {};
}

Element element_of(DType type) {
  switch (type) {
    case DType::bf16:
      return kBf16;
    case DType::fp16:
      return kFp16;
    case DType::fp32:
      break;
  }
  return kFp32;
}

const char* to_string(Framework framework) {
  switch (framework) {
    case Framework::numpy:
      return "NumPy";
    case Framework::torch:
      return "PyTorch";
    case Framework::cupy:
      return "CuPy";
    case Framework::dlpack:
      break;
  }
  return "another framework";
}

bool is_host(Device device) {
  return device.device_type == nb::device::cpu::value || device.device_type == nb::device::cuda_host::value;
}

std::string name_of(Device device) {
  if (is_host(device)) return "host";
  if (device.device_type == nb::device::cuda::value) return str("cuda:", device.device_id);
  return str("DLPack device ", device.device_type, ":", device.device_id);
}

std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

nb::handle CachedAttribute::get_if_loaded(const char* module, const char* attribute) {
  if (found_.is_valid()) return found_;
  const nb::object name = nb::str(module);
  const nb::object loaded = nb::steal(PyImport_GetModule(name.ptr()));
  if (!loaded.is_valid()) {
    clear_error();
    return {};
  }
  // An import may be in progress, so that the module exists and the attribute does not.
  if (nb::hasattr(loaded, attribute)) found_ = nb::object(loaded.attr(attribute)).release();
  return found_;
}

nb::handle CachedAttribute::get(const char* module, const char* attribute) {
  if (!found_.is_valid()) found_ = nb::object(nb::module_::import_(module).attr(attribute)).release();
  return found_;
}

Framework framework_of(nb::handle object) {
  static CachedAttribute torch, numpy, cupy;
  const auto is = [object](nb::handle type) {
    const int answer = type.is_valid() ? PyObject_IsInstance(object.ptr(), type.ptr()) : 0;
    if (answer < 0) throw nb::python_error();
    return answer == 1;
  };
  if (is(torch.get_if_loaded("torch", "Tensor"))) return Framework::torch;
  if (is(numpy.get_if_loaded("numpy", "ndarray"))) return Framework::numpy;
  if (is(cupy.get_if_loaded("cupy", "ndarray"))) return Framework::cupy;
  return Framework::dlpack;
}

nb::object type_object(Framework framework, Element element) {
  const std::string name = name_of(element);
  if (framework == Framework::torch) {
    return nb::borrow(nb::getattr(nb::module_::import_("torch"), name.c_str(), nb::handle()));
  }
  const bool extended = element == kBf16 || (element.bits == 8 && element.code > 6);
  if (extended) {
    const nb::object type = nb::module_::import_("ml_dtypes").attr(name.c_str());
    return nb::module_::import_("numpy").attr("dtype")(type);
  }
  return nb::module_::import_("numpy").attr("dtype")(name);
}

Array inspect(nb::handle object, const char* name) {
  switch (framework_of(object)) {
    case Framework::torch:
      return inspect_torch(object, name);
    case Framework::numpy:
      return inspect_numpy(object, name);
    case Framework::cupy:
      return inspect_cupy(object, name);
    case Framework::dlpack:
      break;
  }
  return inspect_dlpack(object, name);
}

namespace {

template <class Imported>
std::optional<Array> imported(nb::handle capsule) {
  Imported array;
  if (!nb::try_cast(nb::borrow(capsule), array)) {
    clear_error();
    return std::nullopt;
  }
  // The exporter may have made this memory for the import alone, so the import must live on.
  const auto release = [](void* import) noexcept { delete static_cast<Imported*>(import); };
  Array found{.data = const_cast<void*>(static_cast<const void*>(array.data())),
              .element = array.dtype(),
              .device = {array.device_type(), array.device_id()},
              .framework = Framework::dlpack,
              .owner = nb::capsule(new Imported(array), release)};
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    found.shape.push_back(static_cast<std::int64_t>(array.shape(i)));
    found.strides.push_back(array.stride(i));
  }
  return found;
}

// What `export_array`, an array's __dlpack__, returns. Libraries of before DLPack 1.0 do not know
// max_version, and export read-only arrays with it alone.
nb::object exported(const nb::object& export_array, const char* name) {
  using namespace nb::literals;
  try {
    try {
      return export_array("max_version"_a = nb::make_tuple(1, 0));
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      return export_array();
    }
  } catch (nb::python_error& error) {
    if (error.matches(nb::module_::import_("ferry.error").attr("Error"))) throw;  // says what is wrong itself
    refuse_from(error, str(name, ": its __dlpack__ failed: ", text_of(error)));
  }
}

}  // namespace

Array inspect_dlpack(nb::handle object, const char* name) {
  nb::object capsule = nb::borrow(object);
  if (PyCapsule_CheckExact(object.ptr())) {
    const char* kind = PyCapsule_GetName(object.ptr());
    if (kind != nullptr && std::string(kind).rfind("used_", 0) == 0) {
      throw UsageError(str(name, ": a DLPack capsule that was used before: pass the array itself"));
    }
  } else {
    const nb::object export_array = attribute_of(object, "__dlpack__");
    if (!export_array.is_valid()) {
      const std::string type = nb::cast<std::string>(nb::type_name(object.type()));
      throw UsageError(str(
          name, ": expected an array of NumPy, PyTorch or CuPy, or an object with __dlpack__, got ", type));
    }
    capsule = exported(export_array, name);
  }
  // A read-only array refuses the first, writable import.
  if (std::optional<Array> found = imported<nb::ndarray<>>(capsule)) return *std::move(found);
  if (std::optional<Array> found = imported<nb::ndarray<nb::ro>>(capsule)) {
    found->read_only = true;
    return *std::move(found);
  }
  throw UsageError(str(name, ": its __dlpack__ returns no readable array"));
}

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

namespace {

template <class... Kind>
nb::object cast_view(void* data, Element element, const Shape& shape, const Shape& strides, Device device,
                     nb::handle owner) {
  const std::vector<std::size_t> lengths(shape.begin(), shape.end());
  return nb::cast(nb::ndarray<Kind...>(data, lengths.size(), lengths.data(), owner,
                                       strides.empty() ? nullptr : strides.data(), element,
                                       device.device_type, device.device_id));
}

// A type of the same size that the framework's DLPack import accepts.
Element bits_of(Framework framework, Element element) {
  const bool small_float = element.bits == 8 && element.code > 6;
  if (small_float && framework != Framework::dlpack) return kByte;
  const bool numpy_like = framework == Framework::numpy || framework == Framework::cupy;
  if (element == kBf16 && numpy_like) return {1, 16, 1};
  return element;
}

bool is_empty(const Shape& shape) {
  return std::find(shape.begin(), shape.end(), 0) != shape.end();
}

nb::object import_view(Framework framework, void* data, Element element, const Shape& shape,
                       const Shape& strides, Device device, nb::handle owner) {
  switch (framework) {
    case Framework::numpy:
      return cast_view<nb::numpy>(data, element, shape, strides, device, owner);
    case Framework::torch: {
      nb::object view = torch_view_of(data, element, shape, strides, device, owner);
      if (view.is_valid()) return view;
      return cast_view<nb::pytorch>(data, element, shape, strides, device, owner);
    }
    case Framework::cupy:
      return cast_view<nb::cupy>(data, element, shape, strides, device, owner);
    case Framework::dlpack:
      break;
  }
  return cast_view<>(data, element, shape, strides, device, owner);
}

}  // namespace

nb::object view_of(Framework framework, void* data, Element element, const Shape& shape, const Shape& strides,
                   Device device, nb::handle owner) {
  if (framework == Framework::dlpack && is_host(device)) framework = Framework::numpy;
  if (is_empty(shape) && framework != Framework::dlpack) return new_array(framework, element, shape, device);
  const Element bits = bits_of(framework, element);
  const nb::object array = import_view(framework, data, bits, shape, strides, device, owner);
  return bits == element ? array : array.attr("view")(type_object(framework, element));
}

nb::object new_array(Framework framework, Element element, const Shape& shape, Device device) {
  if (framework == Framework::torch) return TensorFactory(device).make({element, shape});
  const nb::object lengths = nb::cast(shape);
  const nb::object type = type_object(framework, element);
  if (!type.is_valid()) throw UsageError(str(to_string(framework), " has no type ", name_of(element)));
  static CachedAttribute numpy_empty, cupy_empty;
  switch (framework) {
    case Framework::cupy:
      return cupy_empty.get("cupy", "empty")(nb::tuple(lengths), type);
    case Framework::dlpack:
      if (!is_host(device)) {
        throw UsageError(
            "results: arrays of this framework cannot be allocated on a device: pass the memory to write to");
      }
      break;
    case Framework::torch:
    case Framework::numpy:
      break;
  }
  return numpy_empty.get("numpy", "empty")(nb::tuple(lengths), type);
}

NewArrays::NewArrays(Framework framework, Device device)
    : framework_(framework), device_(device), tensors_(device) {}

nb::object NewArrays::make_bytes(const TensorShape& shape, void*& data) const {
  if (framework_ == Framework::torch) return tensors_.make(shape, data);
  if (shape.strides.empty()) {
    nb::object array = new_array(framework_, shape.element, shape.lengths, device_);
    data = inspect(array, "memory").data;
    return array;
  }
  const nb::object memory = new_array(framework_, shape.element, {shape.span()}, device_);
  data = inspect(memory, "memory").data;
  return view_of(framework_, data, shape.element, shape.lengths, shape.strides, device_, memory);
}

Stream stream_of(nb::handle given, Framework framework, Device device) {
  const auto number = [](nb::handle handle) {
    std::uintptr_t value = 0;
    if (nb::try_cast(handle, value)) return Stream{reinterpret_cast<void*>(value)};
    clear_error();
    throw UsageError("stream: the number is not a valid stream handle");
  };
  if (!given.is_none()) {
    if (is_host(device)) {
      throw UsageError(
          "stream: the exchange's backend works on host memory, in the calling thread: pass no stream");
    }
    for (const char* name : {"cuda_stream", "ptr"}) {
      if (const nb::object handle = attribute_of(given, name); handle.is_valid()) return number(handle);
    }
    if (nb::isinstance<nb::int_>(given)) return number(given);
    throw UsageError("stream: expected a stream of PyTorch or CuPy, or its number");
  }
  if (is_host(device)) return {};
  static CachedAttribute torch_stream, cupy_stream;
  if (framework == Framework::torch) {
    if (const std::optional<Stream> stream = current_torch_stream(device)) return *stream;
    return number(torch_stream.get("torch.cuda", "current_stream")(device.device_id).attr("cuda_stream"));
  }
  if (framework == Framework::cupy)
    return number(cupy_stream.get("cupy.cuda", "get_current_stream")().attr("ptr"));
  return {};
}

}  // namespace ferry::python
