// Stands in for the CUDA toolkit's header where kernels are compiled for the host.
#pragma once

using cudaStream_t = struct CUstream_st*;
inline int cudaGetDevice(int*) {
  return 0;
}
inline int cudaSetDevice(int) {
  return 0;
}
