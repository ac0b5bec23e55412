// Errors of Ferry as the Python exceptions of ferry.error, with their records.
#pragma once

namespace ferry::python {

// From now on every ferry::Error that leaves a function of the module is one of those exceptions.
void register_errors();

}  // namespace ferry::python
