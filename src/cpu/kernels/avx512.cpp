#include "cpu/kernels/table.hpp"

namespace ferry::cpu {

constinit const Kernels kAvx512Kernels = table("avx512");

}  // namespace ferry::cpu
