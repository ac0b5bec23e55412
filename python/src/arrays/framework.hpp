// The frameworks a program has imported, and access to their arrays beyond what DLPack offers.
#pragma once

#include <optional>

#include "array.hpp"

namespace ferry::python {

// An attribute of a Python module, looked up once and kept for the life of the process.
class CachedAttribute {
 public:
  // Invalid if nothing has imported the module yet.
  nb::handle get_if_loaded(const char* module, const char* attribute);
  // Imports the module if necessary.
  nb::handle get(const char* module, const char* attribute);

 private:
  nb::handle found_;
};

Framework framework_of(nb::handle object);

Element element_named(const std::string& name);  // {} if there is none

// The framework's own object for the type, such as torch.bfloat16; invalid if it has none.
nb::object type_object(Framework framework, Element element);

Array inspect_torch(nb::handle object, const char* name);
Array inspect_numpy(nb::handle object, const char* name);
Array inspect_cupy(nb::handle object, const char* name);
Array inspect_dlpack(nb::handle object, const char* name);

// PyTorch:

// The thread's current GPU by PyTorch's count, if PyTorch has initialised CUDA.
std::optional<int> current_torch_device();

// PyTorch's current stream, if it can be read without running Python code.
std::optional<Stream> current_torch_stream(Device device);

// Like view_of(), for element types that PyTorch can import; invalid if PyTorch can only
// import through Python code.
nb::object torch_view_of(void* data, Element element, const Shape& shape, const Shape& strides, Device device,
                         nb::handle owner);

// The type and shape of tensors that many calls make, with the Python objects for it.
struct TensorShape {
  TensorShape() = default;
  TensorShape(Element element_type, Shape lengths_of, Shape strides_of = {});

  // Elements from the first to the last, gaps included.
  std::int64_t span() const;

  Element element{};
  Shape lengths, strides;  // strides in elements; empty: dense
  nb::object lengths_tuple, strides_tuple;
};

// Allocates tensors on a device, their values undefined. Use one object for one call only: it caches whether
// the device is PyTorch's current one.
class TensorFactory {
 public:
  explicit TensorFactory(Device device);
  nb::object make(const TensorShape& shape) const;
  nb::object make(const TensorShape& shape, void*& data) const;

 private:
  Device device_;
  nb::handle fast_empty_;  // PyTorch's fastest allocation function, or invalid
};

// Makes arrays on one device, for one call.
class NewArrays {
 public:
  NewArrays(Framework framework, Device device);

  Framework framework() const { return framework_; }

  template <class T>
  nb::object make(const TensorShape& shape, T*& data) const {
    void* memory = nullptr;
    nb::object made = make_bytes(shape, memory);
    data = static_cast<T*>(memory);
    return made;
  }

 private:
  nb::object make_bytes(const TensorShape& shape, void*& data) const;

  Framework framework_;
  Device device_;
  TensorFactory tensors_;
};

// Whether the calling thread records gradients.
bool gradients_are_recorded();

// Throws UsageError if the tensor requires a gradient and gradients are being recorded.
void refuse_gradients(nb::handle tensor, const char* name);

// True if the tensor's memory holds its values negated or conjugated, which PyTorch corrects lazily.
bool is_lazily_negated(nb::handle tensor, Element element);

}  // namespace ferry::python
