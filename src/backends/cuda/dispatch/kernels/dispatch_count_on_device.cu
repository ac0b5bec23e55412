// Kernels of a fused dispatch from ids whose token count is known on the device only.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"

namespace ferry::cuda {

template const void* counting_kernel<FewTokens<Quantisation::fp8>, ManyTokens<Quantisation::fp8>>();
template const void*
counting_kernel<FewTokens<Quantisation::microscaled>, ManyTokens<Quantisation::microscaled>>();
template const void* counting_kernel<FewTokens<Quantisation::none>, ManyTokens<Quantisation::none>>();

}  // namespace ferry::cuda
