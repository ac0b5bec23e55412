// For groups of any size.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/operations/small_operations.hpp"

#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/operations/send_values.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {
namespace {

// --- metadata --------------------------------------------------------------------------------------------

// [thread] This rank's count. One that is known on the device only is checked here: the sum over all ranks
// must fit into 31 bits.
__device__ std::int32_t metadata_count(const MetadataArguments& call, std::uint64_t number) {
  if (call.device_count == nullptr) return call.count;
  const std::int32_t count = *call.device_count;
  const std::int32_t most = INT32_MAX / call.lane.ranks;
  if (count >= 0 && count <= most) return count;
  abort_call(call.lane, number, Operation::metadata, DeviceError::Reason::too_many, call.lane.rank, 0, count,
             most);
  return 0;
}

// Sums over this thread's ranks.
struct MetadataSums {
  std::int32_t rank;  // this rank
  StepMetadata of;

  __device__ void operator()(int peer, const HeaderFacts& theirs) {
    of.sum += theirs.count;
    of.prefix += peer < rank ? theirs.count : 0;
    of.maximum = max(of.maximum, theirs.count);
  }
};

template <Phase kPhase>
__global__ void __launch_bounds__(32, 1)
    metadata_kernel(const __grid_constant__ MetadataArguments arguments) {
  __shared__ MetadataArguments shared_arguments;
  copy_to_shared(arguments, &shared_arguments, threadIdx.x, blockDim.x);
  __syncthreads();
  const MetadataArguments& call = shared_arguments;
  __shared__ CallHeader header;
  const LaneView& lane = call.lane;
  if (is_aborted(lane, kExchangeFailed)) return;
  const std::uint64_t number = lane.state->calls[0] + 1;
  const int rank = static_cast<int>(threadIdx.x);
  if (rank == 0) {
    header.terms = call.terms;
    set_epoch(*lane.epoch, &header);
    if constexpr (kPhase != Phase::receive)
      header.facts = make_header_facts(Operation::metadata, metadata_count(call, number));
  }
  __syncwarp();
  if constexpr (kPhase != Phase::receive) post_header(lane, number, header);
  if constexpr (kPhase != Phase::send) {
    StepMetadata all;
    MetadataSums mine{lane.rank, {}};
    const bool agree = await_all_headers_wide(lane, number, header, true, mine);
    if (agree) {
      all.sum = __reduce_add_sync(~0u, mine.of.sum);
      all.prefix = __reduce_add_sync(~0u, mine.of.prefix);
      all.maximum = __reduce_max_sync(~0u, mine.of.maximum);
    }
    if (rank == 0) *call.metadata = all;
    store_call_number(lane, number);
  }
}

__global__ void __launch_bounds__(32 * kValueWarps, 1)
    route_values_kernel(const __grid_constant__ RouteValuesArguments arguments) {
  __shared__ RouteValuesArguments call;
  __shared__ RouteValuesState state;
  copy_to_shared(arguments, &call, threadIdx.x, blockDim.x);
  __syncthreads();
  send_values(call, &state);
}

// --- refusal -----------------------------------------------------------------------------------------------

template <bool kWaits>
__global__ void __launch_bounds__(32, 1) refusal_kernel(const __grid_constant__ RefusalArguments arguments) {
  __shared__ RefusalArguments shared_arguments;
  copy_to_shared(arguments, &shared_arguments, threadIdx.x, blockDim.x);
  __syncthreads();
  const RefusalArguments& call = shared_arguments;
  const LaneView& lane = call.lane;
  if (is_aborted(lane, kExchangeFailed)) return;
  const std::uint64_t number = lane.state->calls[0] + 1;
  for (int peer = 0; peer < lane.ranks; ++peer) {
    if (peer != lane.rank) post_refusal(lane, number, peer, call.operation, call.refusal);
  }
  if constexpr (kWaits) {
    // The next call reuses the staging of the call before this one, so this call may end only when every peer
    // has finished that one, as its header of this call says (docs/protocol-gpu.md).
    drain_headers(lane, number, call.operation);
    store_call_number(lane, number);
  }
}

// --- calls whose messages are carried ----------------------------------------------------------------------

constexpr int kThreads = 256, kBlocksForRank = 16;

// This thread's part of the work on one rank's messages: every kStep-th item from `first` on.
struct Share {
  static constexpr int kStep = kBlocksForRank * kThreads;
  int rank, first;

  __device__ Share()
      : rank(static_cast<int>(blockIdx.x) / kBlocksForRank),
        first(static_cast<int>(blockIdx.x) % kBlocksForRank * kThreads + static_cast<int>(threadIdx.x)) {}
};

// Of the messages from this rank or, with kInbox, of those from other ranks.
template <bool kInbox>
__global__ void __launch_bounds__(kThreads) clear_metadata_kernel(const __grid_constant__ LaneView lane) {
  const Share share;
  if (kInbox && share.rank == lane.rank) return;  // the send phase has stored what comes from this rank
  const int receiver = kInbox ? lane.rank : share.rank, source = kInbox ? share.rank : lane.rank;
  for (int i = share.first; i < lane.max_tokens * lane.top_k; i += Share::kStep) {
    LLPacket* packets = memory::slot_metadata(lane, receiver, 0, source, i / lane.top_k);
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

__global__ void __launch_bounds__(32, 1) agree_kernel(const __grid_constant__ AgreeArguments call) {
  __shared__ CallHeader header;
  const LaneView& lane = call.lane;
  if (is_aborted(lane, kExchangeFailed)) return;
  const std::uint64_t number = lane.state->calls[0] + 1;
  if (threadIdx.x == 0) {
    header.terms = call.terms;
    set_epoch(*lane.epoch, &header);
    header.facts = make_header_facts(call.terms.operation, 0);
  }
  __syncwarp();
  agree_with_all(lane, number, header, true);
  store_call_number(lane, number);
}

__global__ void __launch_bounds__(32, 1) end_refusal_kernel(const __grid_constant__ LaneView lane) {
  if (is_aborted(lane, kExchangeFailed)) return;
  const std::uint64_t number = lane.state->calls[0] + 1;
  store_call_number(lane, number);
}

constexpr const char* kClear = "clear slot metadata";
std::int64_t blocks_for(const LaneView& lane, int) {
  return std::int64_t{kBlocksForRank} * lane.ranks;
}

}  // namespace

const Kernel<MetadataArguments> kMetadataKernels[3] = {
    {&metadata_kernel<Phase::fused>, 32, "launch metadata"},
    {&metadata_kernel<Phase::send>, 32, "post a count"},
    {&metadata_kernel<Phase::receive>, 32, "launch metadata"}};
const Kernel<RouteValuesArguments> kRouteValuesKernel{&route_values_kernel, 32 * kValueWarps,
                                                      "launch route_values"};
const Kernel<RefusalArguments> kRefusalKernel{&refusal_kernel<true>, 32, "launch a refusal"};
const Kernel<RefusalArguments> kPostRefusalKernel{&refusal_kernel<false>, 32, "post a refusal"};
const Kernel<LaneView> kEndRefusalKernel{&end_refusal_kernel, 32, "end a refusal"};
const Kernel<AgreeArguments> kAgreeKernel{&agree_kernel, 32, "end a call of headers"};
const Kernel<LaneView> kClearMetadataKernel{&clear_metadata_kernel<false>, kThreads, kClear, blocks_for};
const Kernel<LaneView> kClearInboxKernel{&clear_metadata_kernel<true>, kThreads, kClear, blocks_for};
const Kernel<ArrivedMessages> kMarkArrivedKernel{
    &mark_arrived_kernel, kThreads, "mark messages",
    [](const ArrivedMessages& call, int most) { return blocks_for(call.lane, most); }};

}  // namespace ferry::cuda
