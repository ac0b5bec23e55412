// Kernels of combine where dispatch has sent every token to every rank (Transfer::gather).
#include "backends/cuda/combine/kernels/combine_kernel.cuh"

namespace ferry::cuda {
namespace {

template <bool kWeights>
using InBf16 = GatheredCombine<SpecialisedCombine<Reduction::partial, DType::bf16, kWeights, false>>;

}  // namespace

const void* gathered_combine_kernel(Phase phase) {
  using Generic = GatheredCombine<GenericCombine>;
  return phase == Phase::fused ? kernel<Generic>() : phase_kernel<Generic>();
}

const void* gathered_bf16_combine_kernel(bool weights_travel) {
  return weights_travel ? kernel<InBf16<true>>() : kernel<InBf16<false>>();
}

}  // namespace ferry::cuda
