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

}  // namespace ferry::python
