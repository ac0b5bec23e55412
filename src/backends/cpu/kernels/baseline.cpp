#include "backends/cpu/kernels/table.hpp"

namespace ferry::cpu {

constinit const Kernels kBaselineKernels = table("baseline");

}  // namespace ferry::cpu
