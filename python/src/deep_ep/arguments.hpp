// Reads the arguments of ferry.deep_ep, and makes the arrays that it returns.
#pragma once

#include "arrays/arguments.hpp"
#include "arrays/framework.hpp"

namespace ferry::python {

// The properties of a matrix of PyTorch or NumPy. Throws UsageError for other objects.
Array inspect_matrix(const nb::object& object, const char* name);

void require_torch_or_numpy(Framework framework, const char* name);

// The array itself if it is C-contiguous, otherwise a copy that is. `found`: its properties.
nb::object dense_array(const nb::object& array, const Array& found);

// An integer from 1 to 2^31 - 1; throws UsageError for anything else.
int positive_integer(const nb::object& number, const char* name);

void refuse_hook_with_event(bool async_finish, bool hooked);

// Makes arrays of PyTorch or NumPy on one device, for one call.
class NewArrays {
 public:
  NewArrays(Framework framework, Device device);

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

}  // namespace ferry::python
