// The kernel tables of all instruction sets. Only kernels.cpp decides which of them this processor can run.
#pragma once

#include "backends/cpu/kernels/kernels.hpp"

namespace ferry::cpu {

extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;    // x86-64 only
extern const Kernels kAvx512Kernels;  // x86-64 only

}  // namespace ferry::cpu
