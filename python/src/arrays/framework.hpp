// The frameworks that have been imported, and how each is asked for what DLPack does not tell.
#pragma once

#include <optional>

#include "arrays/array.hpp"

namespace ferry::python {

// A thing that is looked up once and then kept for the life of the process.
class Kept {
 public:
  // The attribute of a module that something has imported already; an invalid handle if nothing has.
  nb::handle if_loaded(const char* module, const char* attribute);
  // The attribute of a module that is imported if need be.
  nb::handle of(const char* module, const char* attribute);

 private:
  nb::handle found_;
};

Framework framework_of(nb::handle object);

// The thread's device as PyTorch has it, if PyTorch has started on devices.
std::optional<int> device_of_torch();

Element element_named(const std::string& name);  // {} for none

// The stream that PyTorch works on now, if it says so without Python code.
std::optional<Stream> stream_of_torch(Device device);

// As view_of(), of elements that PyTorch's import takes; invalid if it only imports by Python code.
nb::object view_of_torch(void* data, Element element, const Shape& shape, const Shape& strides, Device device,
                         nb::handle owner);

// Makes tensors of PyTorch's own memory on a device, their values undefined. For one call, as it keeps what
// PyTorch's current device was.
class NewTensors {
 public:
  explicit NewTensors(Device device);
  nb::object make(Element element, const Shape& shape) const;
  nb::object make(Element element, const Shape& shape, void*& data) const;

 private:
  Device device_;
  nb::handle quick_;  // the quickest way there is, or invalid
};

// The framework's own object for the type, such as torch.bfloat16; invalid if it has none.
nb::object type_object(Framework framework, Element element);

// Throws UsageError if the tensor requires a gradient and gradients are recorded.
void refuse_gradients(nb::handle tensor, const char* name);

// Whether its memory holds the negatives or the conjugates of its values, as PyTorch may leave it.
bool is_lazily_negated(nb::handle tensor, Element element);

Array look_at_torch(nb::handle object, const char* name);
Array look_at_numpy(nb::handle object, const char* name);
Array look_at_cupy(nb::handle object, const char* name);
Array look_at_dlpack(nb::handle object, const char* name);

}  // namespace ferry::python
