#include "backends/cpu/kernels/table.hpp"

#if !defined(__AVX2__) || !defined(__FMA__)
#error "compiled without the instruction set it is named after"
#endif

namespace ferry::cpu {

constinit const Kernels kAvx2Kernels = table("avx2");

}  // namespace ferry::cpu
