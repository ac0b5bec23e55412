// Kernels for every kind of call, fused and split.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"

namespace ferry::cuda {

template const void* fused_kernel<GenericDispatch>();
template const void* split_kernel<GenericDispatch>();

}  // namespace ferry::cuda
