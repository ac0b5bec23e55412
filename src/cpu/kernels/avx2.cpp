#include "cpu/kernels/table.hpp"

namespace ferry::cpu {

constinit const Kernels kAvx2Kernels = table("avx2");

}  // namespace ferry::cpu
