// Makes arrays, views and streams for what calls return.

#include <algorithm>

#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "cast.hpp"
#include "casters.hpp"
#include "ferry/error.hpp"

namespace ferry::python {
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
