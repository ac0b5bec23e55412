// Turns CUDA error codes into exceptions of Ferry.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace ferry::cuda {

// Throws if `result` is not success. The message says what failed (`action` follows "cannot") and gives
// CUDA's name and text of the error.
// @throws UnsupportedError  this machine or its driver lacks something; the message says what to do
// @throws SystemError       any other error; error_number is ENOMEM if memory ran out and EIO otherwise,
//                           because CUDA's numbers are not errno values
void check(cudaError_t result, const char* action);
void check(CUresult result, const char* action);

}  // namespace ferry::cuda
