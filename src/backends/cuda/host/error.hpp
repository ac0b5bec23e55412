// Errors of CUDA as errors of Ferry.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace ferry::cuda {

// Returns if `result` is success. Otherwise throws an error with CUDA's name and text for it and what was
// being done (`doing` follows "cannot"): UnsupportedError where this machine or its driver lacks what is
// needed, with what to do about it, SystemError for everything else. Its error_number is ENOMEM where memory
// did not suffice and EIO otherwise, as CUDA's numbers are no errno.
void check(cudaError_t result, const char* doing);
void check(CUresult result, const char* doing);

}  // namespace ferry::cuda
