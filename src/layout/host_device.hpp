// FERRY_HD: marks a function that the host and CUDA devices both compile.
#pragma once

// Always inlined: the host compiles some sources several times, for different instruction sets. Of
// out-of-line copies the linker would keep one, perhaps one that the processor cannot run.
#if defined(__CUDACC__)
#define FERRY_HD __host__ __device__ __forceinline__
// Before a FERRY_HD template that calls its argument: the argument may be a function of one side only.
#define FERRY_HD_CALLS_ARGUMENT _Pragma("nv_exec_check_disable")
#else
#define FERRY_HD inline __attribute__((always_inline))  // GCC and Clang
#define FERRY_HD_CALLS_ARGUMENT
#endif
