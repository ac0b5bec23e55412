// Kernels of dispatches whose tokens go to every rank (Transfer::gather).
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"

namespace ferry::cuda {

template const void* fused_kernel<GatheredFewTokens<Quantisation::fp8>>();
template const void* counting_kernel<GatheredFewTokens<Quantisation::fp8>, void>();
template const void* fused_kernel<GatheredFewTokens<Quantisation::microscaled>>();
template const void* counting_kernel<GatheredFewTokens<Quantisation::microscaled>, void>();
template const void* fused_kernel<GatheredFewTokens<Quantisation::none>>();
template const void* counting_kernel<GatheredFewTokens<Quantisation::none>, void>();
template const void* fused_kernel<GatheredDispatch<GenericDispatch>>();
template const void* split_kernel<GatheredDispatch<GenericDispatch>>();

}  // namespace ferry::cuda
