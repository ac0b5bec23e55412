// Kernels of a fused dispatch from ids whose token count is known on the device only.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {
namespace {

// Chooses between the modes of many and of few tokens at run time, so that a call of few tokens does not pay
// for the upper bound that the host knows.
template <Quantisation kQuantisation>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_count_on_device_kernel(const __grid_constant__ DispatchArguments call) {
  const std::int64_t tokens = token_count(call, false);
  if (tokens >= kManyTokens)
    return run_dispatch_block<Phase::fused, SpecialisedDispatch<kQuantisation, false>>(call, call.partition);
  run_dispatch_block<Phase::fused, SpecialisedDispatch<kQuantisation, true>>(
      call, SendPartition::of(tokens, call.few_token_blocks.senders));
}

}  // namespace

const void* count_on_device_kernel(Quantisation quantisation) {
  switch (quantisation) {
    case Quantisation::none:
      break;
    case Quantisation::fp8:
      return reinterpret_cast<const void*>(&dispatch_count_on_device_kernel<Quantisation::fp8>);
    case Quantisation::mx:
    case Quantisation::nvfp4:
    case Quantisation::microscaled:
      return reinterpret_cast<const void*>(&dispatch_count_on_device_kernel<Quantisation::microscaled>);
  }
  return reinterpret_cast<const void*>(&dispatch_count_on_device_kernel<Quantisation::none>);
}

}  // namespace ferry::cuda
