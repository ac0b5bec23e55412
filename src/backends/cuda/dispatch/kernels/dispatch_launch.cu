// Which kernel a dispatch runs, and its launch.
#include <algorithm>
#include <array>

#include "backends/cuda/dispatch/block_state.cuh"
#include "backends/cuda/dispatch/dispatch_traits.cuh"

namespace ferry::cuda {
namespace {

using enum Quantisation;

// A kernel for each quantisation: none, fp8, mx, nvfp4.
using Kernels = std::array<const void* (*)(), 4>;
template <DispatchMode kMode>
constexpr Kernels kSpecialised{
    &fused_kernel<SpecialisedDispatch<none, kMode>>, &fused_kernel<SpecialisedDispatch<fp8, kMode>>,
    &fused_kernel<SpecialisedDispatch<mx, kMode>>, &fused_kernel<SpecialisedDispatch<nvfp4, kMode>>};
// From kernels that serve both microscaled formats.
constexpr Kernels each(const void* (*for_none)(), const void* (*for_fp8)(),
                       const void* (*for_microscaled)()) {
  return {for_none, for_fp8, for_microscaled, for_microscaled};
}
constexpr Kernels generic(const void* (*for_all)()) {
  return {for_all, for_all, for_all, for_all};
}

// The modes that a kind of call has, and their kernels. dispatch_mode() chooses the mode.
struct TableRow {
  bool to_every_rank, fused;
  DispatchMode mode;
  Kernels kernels;
};
constexpr bool kRouted = false, kGathered = true, kFused = true, kSplit = false;
constexpr TableRow kTable[] = {
    {kRouted, kFused, DispatchMode::many_tokens, kSpecialised<DispatchMode::many_tokens>},
    {kRouted, kFused, DispatchMode::few_tokens, kSpecialised<DispatchMode::few_tokens>},
    {kRouted, kFused, DispatchMode::by_plan, kSpecialised<DispatchMode::by_plan>},
    {kRouted, kFused, DispatchMode::count_on_device,
     each(&counting_kernel<FewTokens<none>, ManyTokens<none>>,
          &counting_kernel<FewTokens<fp8>, ManyTokens<fp8>>,
          &counting_kernel<FewTokens<microscaled>, ManyTokens<microscaled>>)},
    {kRouted, kFused, DispatchMode::generic, generic(&fused_kernel<GenericDispatch>)},
    {kRouted, kSplit, DispatchMode::many_tokens,
     each(&split_kernel<ManyTokens<none>>, &split_kernel<ManyTokens<fp8>>,
          &split_kernel<ManyTokens<microscaled>>)},
    {kRouted, kSplit, DispatchMode::generic, generic(&split_kernel<GenericDispatch>)},
    {kGathered, kFused, DispatchMode::few_tokens,
     each(&fused_kernel<GatheredFewTokens<none>>, &fused_kernel<GatheredFewTokens<fp8>>,
          &fused_kernel<GatheredFewTokens<microscaled>>)},
    {kGathered, kFused, DispatchMode::count_on_device,
     each(&counting_kernel<GatheredFewTokens<none>, void>, &counting_kernel<GatheredFewTokens<fp8>, void>,
          &counting_kernel<GatheredFewTokens<microscaled>, void>)},
    {kGathered, kFused, DispatchMode::generic, generic(&fused_kernel<GatheredDispatch<GenericDispatch>>)},
    {kGathered, kSplit, DispatchMode::generic, generic(&split_kernel<GatheredDispatch<GenericDispatch>>)},
};

const void* kernel_of(const DispatchArguments& call, DispatchMode mode) {
  if (takes_wide_kernels(call.lane.ranks)) return wide_dispatch_kernel(call.phase);
  const bool fused = call.phase == Phase::fused;
  const auto* const row = std::ranges::find_if(kTable, [&](const TableRow& of) {
    return of.to_every_rank == call.lane.to_every_rank() && of.fused == fused && of.mode == mode;
  });
  return row->kernels[static_cast<std::size_t>(quantisation_of(call.encoding))]();
}

// Lays out a block's shared memory. Returns its bytes.
std::int64_t lay_out(DispatchArguments* call) {
  return takes_wide_kernels(call->lane.ranks) ? lay_out_wide_block(call) : lay_out_block(call);
}

}  // namespace

std::int64_t dispatch_shared_bytes(const LaneView& lane) {
  DispatchArguments call{};
  call.lane = lane;
  return lay_out(&call);
}

void prepare_dispatch(const LaneView& lane) {
  const std::int64_t shared_bytes = dispatch_shared_bytes(lane);
  if (takes_wide_kernels(lane.ranks)) {
    for (const Phase phase : {Phase::fused, Phase::send})
      allow_shared_bytes(wide_dispatch_kernel(phase), shared_bytes);
    return;
  }
  for (const TableRow& row : kTable) {
    if (row.to_every_rank != lane.to_every_rank()) continue;
    for (const auto kernel : row.kernels) allow_shared_bytes(kernel(), shared_bytes);
  }
}

void launch_dispatch(const DispatchArguments& arguments, DispatchMode mode, const LaunchShape& shape,
                     cudaStream_t stream) {
  DispatchArguments call = arguments;
  const auto shared_bytes = static_cast<std::size_t>(lay_out(&call));
  const bool wide = takes_wide_kernels(call.lane.ranks);
  const auto [senders, metadata_blocks] =
      !wide && may_have_metadata_blocks(mode) ? call.few_token_blocks : call.many_token_blocks;
  // A kernel that reads the token count from device memory makes its own partitions.
  const bool one_role_each = call.phase == Phase::fused && shape.blocks > 1;
  const int sending = one_role_each ? senders : std::min(shape.blocks, kMaxSenders);
  call.partition =
      wide ? SendPartition::whole(call.tokens, sending) : SendPartition::of(call.tokens, sending);
  if (!wide && metadata_blocks > 0)
    call.metadata_partition = SendPartition::whole(call.tokens, metadata_blocks - 1);
  launch({kernel_of(call, mode), kBlockThreads, shared_bytes, "launch dispatch"}, &call, shape, stream);
}

}  // namespace ferry::cuda
