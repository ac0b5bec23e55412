// Kernels of fused dispatches that quantise rows to NVFP4.
//
// The three stay in one translation unit: without by_plan the compiler changes the signatures of the wait
// functions, and the kernel of few_tokens spills.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"

namespace ferry::cuda {

template const void* fused_kernel<ByPlan<Quantisation::nvfp4>>();
template const void* fused_kernel<FewTokens<Quantisation::nvfp4>>();
template const void* fused_kernel<ManyTokens<Quantisation::nvfp4>>();

}  // namespace ferry::cuda
