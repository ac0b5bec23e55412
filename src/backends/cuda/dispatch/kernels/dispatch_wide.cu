// Kernels for groups of more than kNarrowRanks ranks, for every kind of call. Messages are indexed by number,
// whole rows are sent, and all go through staging.
#define FERRY_WIDE_KERNELS
#include <algorithm>

#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {
namespace {

const void* wide_kernel(Phase phase) {
  return phase == Phase::fused ? kernel<GenericDispatch>() : kernel_of_phases<GenericDispatch>();
}

}  // namespace

std::int64_t wide_dispatch_shared_bytes(const LaneView& lane) {
  DispatchArguments call{};
  call.lane = lane;
  return lay_out_block(&call);
}

void prepare_wide_dispatch(const LaneView& lane) {
  for (const Phase phase : {Phase::fused, Phase::send})
    allow_shared_bytes(wide_kernel(phase), wide_dispatch_shared_bytes(lane));
}

void launch_wide_dispatch(const DispatchArguments& arguments, const LaunchShape& shape, cudaStream_t stream) {
  DispatchArguments call = arguments;
  const auto shared_bytes = static_cast<std::size_t>(lay_out_block(&call));
  const bool one_role_each = call.phase == Phase::fused && shape.blocks > 1;
  call.partition = SendPartition::whole(
      call.tokens, one_role_each ? call.many_token_blocks.senders : std::min(shape.blocks, kMaxSenders));
  launch(wide_kernel(call.phase), &call, kBlockThreads, shared_bytes, shape, stream, "launch dispatch");
}

}  // namespace ferry::cuda
