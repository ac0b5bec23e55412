// Kernels of fused dispatches whose rows are moved unchanged.
//
// The three stay in one translation unit: without by_plan the compiler changes the signatures of the wait
// functions, and the kernel of few_tokens spills.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"

namespace ferry::cuda {

template const void* fused_kernel<ByPlan<Quantisation::none>>();
template const void* fused_kernel<FewTokens<Quantisation::none>>();
template const void* fused_kernel<ManyTokens<Quantisation::none>>();

}  // namespace ferry::cuda
