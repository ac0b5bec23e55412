// Arrays of any framework: memory, type, shape, strides.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "casters.hpp"
#include "ferry/types.hpp"

namespace ferry::python {

namespace nb = nanobind;

// The library that an array belongs to. Calls return arrays of the framework of their arguments. `dlpack` is
// any other library: for its arrays calls return NumPy arrays, and on devices DLPack capsules.
enum class Framework { numpy, torch, cupy, dlpack };

const char* to_string(Framework framework);

// The type of an array's elements, by DLPack's numbers.
using Element = nb::dlpack::dtype;

inline constexpr Element kBf16{4, 16, 1}, kFp16{2, 16, 1}, kFp32{2, 32, 1}, kFp8{10, 8, 1};
inline constexpr Element kInt32{0, 32, 1}, kInt64{0, 64, 1}, kByte{1, 8, 1}, kBool{6, 8, 1};

std::string name_of(Element element);  // its name in NumPy and PyTorch
bool is_named(Element element);        // true if the element has a name
Element element_of(DType type);

// Where memory is. Host memory is {kDLCPU, 0}.
using Device = nb::dlpack::device;
inline constexpr Device kHost{nb::device::cpu::value, 0};

bool is_host(Device device);
std::string name_of(Device device);

using Shape = std::vector<std::int64_t>;

std::string shape_text(const Shape& shape);

struct Array {
  void* data = nullptr;
  Element element{};
  Device device = kHost;
  Shape shape{}, strides{};  // strides in elements
  bool read_only = false;
  Framework framework = Framework::dlpack;
  nb::object owner{};  // keeps the memory alive

  std::int64_t element_bytes() const { return element.bits / 8; }
};

// Reads an array's properties. Throws UsageError, with the argument's name, if
// `object` is not a readable array.
Array inspect(nb::handle object, const char* name);

// An array of the framework over memory that `owner` keeps alive. `strides` in elements; empty: dense.
nb::object view_of(Framework framework, void* data, Element element, const Shape& shape, const Shape& strides,
                   Device device, nb::handle owner);

// A new array of the framework; its values are undefined.
nb::object new_array(Framework framework, Element element, const Shape& shape, Device device);

// The stream `given`, a number or an object of PyTorch or CuPy; for None the framework's current stream.
Stream stream_of(nb::handle given, Framework framework, Device device);

}  // namespace ferry::python
