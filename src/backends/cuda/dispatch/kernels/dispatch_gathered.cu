// Kernels of dispatches whose tokens go to every rank (Transfer::gather).
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {
namespace {

using Generic = GatheredDispatch<GenericDispatch>;

template <Quantisation kQuantisation>
const void* few_tokens_kernel() {
  return kernel<GatheredDispatch<SpecialisedDispatch<kQuantisation, true>>>();
}

}  // namespace

const void* gathered_kernel(DispatchMode mode, Quantisation quantisation) {
  if (mode == DispatchMode::generic) return kernel<Generic>();
  if (mode != DispatchMode::few_tokens) return reinterpret_cast<const void*>(&dispatch_phase_kernel<Generic>);
  return quantisation == Quantisation::none  ? few_tokens_kernel<Quantisation::none>()
         : quantisation == Quantisation::fp8 ? few_tokens_kernel<Quantisation::fp8>()
                                             : few_tokens_kernel<Quantisation::microscaled>();
}

}  // namespace ferry::cuda
