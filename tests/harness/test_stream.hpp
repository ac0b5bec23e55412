// The CUDA stream of the tests: the library's own wrapper.
#pragma once

#include "backends/cuda/runtime/stream.hpp"

namespace ferry::contract {

using TestStream = cuda::CudaStream;

}  // namespace ferry::contract
