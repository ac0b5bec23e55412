// Launches the kernel of a dispatch's mode.
#include <algorithm>

#include "backends/cuda/dispatch/block_state.cuh"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {
namespace {

const void* kernel_of(const LaneView& lane, Phase phase, DispatchMode mode, Quantisation quantisation) {
  if (lane.to_every_rank()) return gathered_kernel(phase, mode, quantisation);
  if (phase != Phase::fused)
    return mode == DispatchMode::generic ? generic_kernel(phase) : phase_kernel(quantisation);
  switch (mode) {
    case DispatchMode::many_tokens:
    case DispatchMode::few_tokens:
    case DispatchMode::by_plan:
      return quantisation == Quantisation::none  ? unquantised_kernel(mode)
             : quantisation == Quantisation::fp8 ? fp8_kernel(mode)
             : quantisation == Quantisation::mx  ? mx_kernel(mode)
                                                 : nvfp4_kernel(mode);
    case DispatchMode::count_on_device:
      return count_on_device_kernel(quantisation);
    case DispatchMode::generic:
      break;
  }
  return generic_kernel(phase);
}

}  // namespace

std::int64_t dispatch_shared_bytes(const LaneView& lane) {
  if (takes_wide_kernels(lane.ranks)) return wide_dispatch_shared_bytes(lane);
  DispatchArguments call{};
  call.lane = lane;
  return lay_out_block(&call);
}

void prepare_dispatch(const LaneView& lane) {
  if (takes_wide_kernels(lane.ranks)) return prepare_wide_dispatch(lane);
  const std::int64_t shared_bytes = dispatch_shared_bytes(lane);
  for (const Quantisation quantisation :
       {Quantisation::none, Quantisation::fp8, Quantisation::mx, Quantisation::nvfp4}) {
    for (const DispatchMode mode :
         {DispatchMode::many_tokens, DispatchMode::few_tokens, DispatchMode::count_on_device,
          DispatchMode::by_plan, DispatchMode::generic})
      allow_shared_bytes(kernel_of(lane, Phase::fused, mode, quantisation), shared_bytes);
    for (const DispatchMode mode : {DispatchMode::many_tokens, DispatchMode::generic})
      allow_shared_bytes(kernel_of(lane, Phase::send, mode, quantisation), shared_bytes);
  }
}

void launch_dispatch(const DispatchArguments& arguments, DispatchMode mode, const LaunchShape& shape,
                     cudaStream_t stream) {
  if (takes_wide_kernels(arguments.lane.ranks)) return launch_wide_dispatch(arguments, shape, stream);
  DispatchArguments call = arguments;
  const auto shared_bytes = static_cast<std::size_t>(lay_out_block(&call));
  const auto [senders, metadata_blocks] =
      may_have_metadata_blocks(mode) ? call.few_token_blocks : call.many_token_blocks;
  // A kernel that reads the token count from device memory makes its own partitions.
  const bool one_role_each = call.phase == Phase::fused && shape.blocks > 1;
  call.partition =
      SendPartition::of(call.tokens, one_role_each ? senders : std::min(shape.blocks, kMaxSenders));
  if (metadata_blocks > 0) call.metadata_partition = SendPartition::whole(call.tokens, metadata_blocks - 1);
  launch(kernel_of(call.lane, call.phase, mode, quantisation_of(call.encoding)), &call, kBlockThreads,
         shared_bytes, shape, stream, "launch dispatch");
}

}  // namespace ferry::cuda
