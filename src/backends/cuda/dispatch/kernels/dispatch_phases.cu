// Kernels of split dispatches whose rows are moved, not computed, and whose routes come from ids.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"

namespace ferry::cuda {

template const void* split_kernel<ManyTokens<Quantisation::fp8>>();
template const void* split_kernel<ManyTokens<Quantisation::microscaled>>();
template const void* split_kernel<ManyTokens<Quantisation::none>>();

}  // namespace ferry::cuda
