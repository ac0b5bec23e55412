// Kernels of dispatches whose tokens go to every rank (Transfer::gather).
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {
namespace {

using Generic = GatheredDispatch<GenericDispatch>;
template <Quantisation kQuantisation>
using FewTokens = GatheredDispatch<SpecialisedDispatch<kQuantisation, true>>;

// N is known on the device only; the host knows that it is below kManyTokens.
template <Quantisation kQuantisation>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_gathered_count_kernel(const __grid_constant__ DispatchArguments call) {
  run_dispatch_block<Phase::fused, FewTokens<kQuantisation>>(
      call, SendPartition::of(token_count(call, false), call.few_token_blocks.senders));
}

template <Quantisation kQuantisation>
const void* few_tokens_kernel(DispatchMode mode) {
  if (mode == DispatchMode::few_tokens) return kernel<FewTokens<kQuantisation>>();
  return reinterpret_cast<const void*>(&dispatch_gathered_count_kernel<kQuantisation>);
}

const void* few_tokens_kernel(DispatchMode mode, Quantisation quantisation) {
  switch (quantisation) {
    case Quantisation::fp8:
      return few_tokens_kernel<Quantisation::fp8>(mode);
    case Quantisation::mx:
    case Quantisation::nvfp4:
    case Quantisation::microscaled:
      return few_tokens_kernel<Quantisation::microscaled>(mode);
    case Quantisation::none:
      break;
  }
  return few_tokens_kernel<Quantisation::none>(mode);
}

}  // namespace

const void* gathered_kernel(Phase phase, DispatchMode mode, Quantisation quantisation) {
  if (phase != Phase::fused) return kernel_of_phases<Generic>();
  if (may_have_metadata_blocks(mode)) return few_tokens_kernel(mode, quantisation);
  return kernel<Generic>();
}

}  // namespace ferry::cuda
