// Kernels for groups of more than kNarrowRanks ranks, for every kind of call. Messages are indexed by number,
// whole rows are sent, and all go through staging.
#define FERRY_WIDE_KERNELS
#include <algorithm>

#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {
namespace {

const void* wide_kernel(DispatchMode mode) {
  const bool split = mode == DispatchMode::send_phase || mode == DispatchMode::receive_phase;
  return split ? reinterpret_cast<const void*>(&dispatch_phase_kernel<GenericDispatch>)
               : kernel<GenericDispatch>();
}

}  // namespace

std::int64_t wide_dispatch_shared_bytes(const LaneView& lane) {
  DispatchArguments call{};
  call.lane = lane;
  return lay_out_block(&call);
}

void prepare_wide_dispatch(const LaneView& lane) {
  for (const DispatchMode mode : {DispatchMode::generic, DispatchMode::send_phase})
    allow_shared_bytes(wide_kernel(mode), wide_dispatch_shared_bytes(lane));
}

void launch_wide_dispatch(const DispatchArguments& arguments, DispatchMode mode, const LaunchShape& shape,
                          cudaStream_t stream) {
  DispatchArguments call = arguments;
  const auto shared_bytes = static_cast<std::size_t>(lay_out_block(&call));
  call.phase = mode == DispatchMode::send_phase      ? Phase::send
               : mode == DispatchMode::receive_phase ? Phase::receive
                                                     : Phase::fused;
  const bool one_role_each = call.phase == Phase::fused && shape.blocks > 1;
  call.partition = SendPartition::whole(
      call.tokens, one_role_each ? call.many_token_blocks.senders : std::min(shape.blocks, kMaxSenders));
  launch(wide_kernel(mode), &call, kBlockThreads, shared_bytes, shape, stream, "launch dispatch");
}

}  // namespace ferry::cuda
