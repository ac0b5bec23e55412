#include "backends/cpu/kernels/table.hpp"

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "compiled without the instruction set it is named after"
#endif

namespace ferry::cpu {

constinit const Kernels kAvx512Kernels = table("avx512");

}  // namespace ferry::cpu
