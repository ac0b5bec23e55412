#include "backends/cpu/kernels/table.hpp"

#if !defined(__AVX2__) || !defined(__FMA__)
#error "this file must be compiled for the instruction set in its name"
#endif

namespace ferry::cpu {

constinit const Kernels kAvx2Kernels = table("avx2");

}  // namespace ferry::cpu
