#include "backends/cpu/kernels/kernels.hpp"

#include <array>
#include <cstddef>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ferry::cpu {
namespace {

// The kernel tables that this processor can run, slowest first.
struct AvailableKernels {
  std::array<const Kernels*, 3> tables{};
  std::size_t count = 0;

  AvailableKernels() {
    tables[count++] = &kBaselineKernels;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables[count++] = &kAvx2Kernels;
#if defined(FERRY_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tables[count++] = &kAvx512Kernels;
    }
#endif
#endif
  }
};

const AvailableKernels& available() {
  static const AvailableKernels instance;
  return instance;
}

}  // namespace

void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

const Kernels& kernels() {
  return *available().tables[available().count - 1];
}

std::span<const Kernels* const> available_kernels() {
  return {available().tables.data(), available().count};
}

}  // namespace ferry::cpu
