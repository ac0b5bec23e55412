#define FERRY_WIDE_KERNELS  // for groups of any size
#include "backends/cuda/operations/engine_messages.hpp"

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda {
namespace {

constexpr int kThreads = 256, kBlocksForRank = 16;

// This thread's part of the work on one rank's messages: every kStep-th item from `first` on.
struct Share {
  static constexpr int kStep = kBlocksForRank * kThreads;
  int rank, first;

  __device__ Share()
      : rank(static_cast<int>(blockIdx.x) / kBlocksForRank),
        first(static_cast<int>(blockIdx.x) % kBlocksForRank * kThreads + static_cast<int>(threadIdx.x)) {}
};

__global__ void __launch_bounds__(kThreads) clear_metadata_kernel(const __grid_constant__ LaneView lane) {
  const Share share;
  for (int i = share.first; i < lane.max_tokens * lane.top_k; i += Share::kStep) {
    LLPacket* packets = memory::slot_metadata(lane, share.rank, 0, lane.rank, i / lane.top_k);
    packets[i % lane.top_k] = {0, 0};
  }
}

__global__ void __launch_bounds__(kThreads)
    mark_arrived_kernel(const __grid_constant__ ArrivedMessages call) {
  const Share share;
  const LaneView& lane = call.lane;
  // The receive phase, whose kernel counts the call, comes later on the stream.
  const std::uint64_t number = lane.state->calls[0] + 1;
  for (int i = share.first; i < call.from[share.rank]; i += Share::kStep) {
    const LLPacket metadata = *memory::slot_metadata(lane, lane.rank, 0, share.rank, i);
    if (metadata.call >> SlotMetadata::kTokenBits != number) continue;
    Flag* flags = memory::dispatch_flags(lane, lane.rank, 0, share.rank, i);
    for (int quarter = 0; quarter < kQuarters; ++quarter) store_relaxed_sys(flags + quarter, number);
  }
}

}  // namespace

const Kernel<LaneView> kClearMetadataKernel{
    &clear_metadata_kernel, kThreads, "clear slot metadata",
    [](const LaneView& lane, int) { return std::int64_t{kBlocksForRank} * lane.ranks; }};
const Kernel<ArrivedMessages> kMarkArrivedKernel{
    &mark_arrived_kernel, kThreads, "mark messages",
    [](const ArrivedMessages& call, int) { return std::int64_t{kBlocksForRank} * call.lane.ranks; }};

}  // namespace ferry::cuda
