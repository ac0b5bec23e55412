// Functions that are one source for the host and for CUDA devices.
#pragma once

// A FERRY_HD function is always inlined: the host compiles some sources several times, for different
// instruction sets, and a shared out-of-line copy would let the linker pick one that the processor cannot
// run.
#if defined(__CUDACC__)
#define FERRY_HD __host__ __device__ __forceinline__
#else
#define FERRY_HD inline __attribute__((always_inline))  // GCC and Clang
#endif
