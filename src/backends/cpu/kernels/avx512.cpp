#include "backends/cpu/kernels/table.hpp"

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "this file must be compiled for the instruction set in its name"
#endif

namespace ferry::cpu {

constinit const Kernels kAvx512Kernels = table("avx512");

}  // namespace ferry::cpu
