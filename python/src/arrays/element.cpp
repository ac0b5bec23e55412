// Names of elements, devices and frameworks.
#include <algorithm>

#include "arrays/array.hpp"
#include "base/text.hpp"

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

}  // namespace ferry::python
