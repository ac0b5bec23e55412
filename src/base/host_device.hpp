// FERRY_HD marks functions that are compiled for the host and for CUDA devices from one source.
#pragma once

// FERRY_HD functions are always inlined. Some host sources are compiled several times for different
// instruction sets; of out-of-line copies the linker would keep one for all, perhaps one that the processor
// cannot run.
#if defined(__CUDACC__)
#define FERRY_HD __host__ __device__ __forceinline__
// Before a FERRY_HD template that calls its argument, which may be a function of one side only.
#define FERRY_HD_CALLS_ARGUMENT _Pragma("nv_exec_check_disable")
#else
#define FERRY_HD inline __attribute__((always_inline))  // GCC and Clang
#define FERRY_HD_CALLS_ARGUMENT
#endif
