// Turns errors of CUDA runtime calls that tests make into failures of the test.
#pragma once

#include <cuda_runtime_api.h>

#include "harness/check.hpp"

namespace ferry::contract::device {

inline void require_success(cudaError_t status, const char* what) {
  require(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

}  // namespace ferry::contract::device
