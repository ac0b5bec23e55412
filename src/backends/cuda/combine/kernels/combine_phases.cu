// Kernels of common split calls in bf16.
#include "backends/cuda/combine/kernels/combine_kernel.cuh"

namespace ferry::cuda {
namespace {

template <Reduction kReduction>
using Common = SplitCombine<SpecialisedCombine<kReduction, DType::bf16, false, false>>;

}  // namespace

const void* bf16_combine_phase_kernel(Reduction reduction) {
  return reduction == Reduction::exact ? phase_kernel<Common<Reduction::exact>>()
                                       : phase_kernel<Common<Reduction::partial>>();
}

}  // namespace ferry::cuda
