// The stream type of the tests: the library's own wrapper.
#pragma once

#include "backends/cuda/host/cuda_stream.hpp"

namespace ferry::contract {

using OwnStream = cuda::CudaStream;

}  // namespace ferry::contract
