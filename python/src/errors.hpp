// Translates C++ errors to the Python exceptions of ferry.error, with their records.
#pragma once

namespace ferry::python {

// Registers the translation for every function of the module.
void register_errors();

}  // namespace ferry::python
