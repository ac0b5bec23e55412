// For groups of any size.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/operations/small_operations.hpp"

#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/operations/route_values.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/plan_entries.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "plan/slot.hpp"

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

// --- route values ------------------------------------------------------------------------------------------

constexpr int kValueWarps = 8;
constexpr int kValueSendWarps = 4;

// [thread] Sets the values of padding rows and of shared experts' rows to 0.
__device__ void zero_unsent_values(const RouteValuesArguments& call, const PlanView& plan, int thread,
                                   int threads) {
  for (std::int64_t row = thread; row < plan.header->total; row += threads) {
    const Source source = plan.sources[row];
    if (source.rank < 0 || is_shared_slot(source.slot, call.lane.top_k)) call.row_values[row] = 0;
  }
}

// The messages from this rank to each rank or, if `sent` is false, from each rank to this one, as in the
// plan.
__device__ PeerMessages messages_with(const LaneView& lane, const PlanView& plan, bool sent) {
  return {.lane = &lane, .tokens_between = plan.tokens_between, .sent = sent};
}

// [warp] Receives the values of the messages that fall to warp `worker` of `workers`.
__device__ void receive_values(const RouteValuesArguments& call, std::uint64_t number, int worker,
                               int workers, const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32;
  RouteValueIterator partition(lane, messages_with(lane, plan, false), worker, workers);
  int source;
  std::int32_t i;
  while (partition.next(&source, &i)) {
    const std::int64_t where = std::int64_t{source} * lane.max_tokens + i;
    float value;
    const WaitResult result =
        await_route_value(lane, Payload::rows, {call.operation, number, source}, i, &value);
    if (result == WaitResult::aborted) return;
    if (result == WaitResult::end_of_data) {
      if (slot == 0) record_bad_source(lane, where);
      continue;
    }
    if (slot >= lane.top_k) continue;
    const std::int32_t row = plan.received_rows_of_message[where * lane.top_k + slot];
    if (row == -1 || !valid_entry(lane, row, plan.header->total, where * lane.top_k + slot)) continue;
    call.row_values[row] = value;
  }
}

// In shared memory.
struct RouteValuesState {
  CallHeader header;
  ErrorRecord refusal;
  std::uint64_t number;
  bool failed;
  PlanFault fault;
};

// [block] The first warps send, the others receive; the first warp of block 0 posts and compares the call
// headers.
__device__ void run_route_values(const RouteValuesArguments& call, RouteValuesState* state,
                                 const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int warp = threadIdx.x / 32, block = static_cast<int>(blockIdx.x),
            blocks = static_cast<int>(gridDim.x);
  const bool coordinates = block == 0 && warp == 0, sends = call.phase != Phase::receive,
             receives = call.phase != Phase::send;
  if (coordinates) {
    if (threadIdx.x == 0) {
      state->header.terms = call.terms;
      state->header.terms.add(static_cast<std::int64_t>(plan.header->call));
      set_epoch(*lane.epoch, &state->header);
      state->header.facts = make_header_facts(call.operation, plan.header->tokens);
    }
    __syncwarp();
    if (sends) post_header(lane, state->number, state->header);
    if (receives) agree_with_all(lane, state->number, state->header, true);
  }
  if (warp < kValueSendWarps) {
    if (!sends) return;
    if (!coordinates)
      send_route_values(lane, state->number, call.values,
                        RouteValueIterator(lane, messages_with(lane, plan, true),
                                           block * kValueSendWarps + warp - 1, blocks * kValueSendWarps - 1),
                        plan);
    sync_threads_of(1, 32 * kValueSendWarps);
    if (threadIdx.x == 0) publish_end_of_stream(lane, state->number, blocks);
    return;
  }
  if (!receives) return;
  constexpr int kReceiveWarps = kValueWarps - kValueSendWarps;
  const int worker = block * kReceiveWarps + warp - kValueSendWarps;
  zero_unsent_values(call, plan, 32 * worker + static_cast<int>(threadIdx.x % 32),
                     32 * kReceiveWarps * blocks);
  receive_values(call, state->number, worker, kReceiveWarps * blocks, plan);
}

__global__ void __launch_bounds__(32 * kValueWarps, 1)
    route_values_kernel(const __grid_constant__ RouteValuesArguments arguments) {
  __shared__ RouteValuesArguments shared_arguments;
  copy_to_shared(arguments, &shared_arguments, threadIdx.x, blockDim.x);
  __syncthreads();
  const RouteValuesArguments& call = shared_arguments;
  __shared__ RouteValuesState state;
  const LaneView& lane = call.lane;
  const PlanView plan = view_plan(call.plan, lane.plan_shape);
  if (threadIdx.x == 0) {
    state.number = lane.state->calls[blockIdx.x] + 1;
    state.failed = is_aborted(lane, kExchangeFailed);
    state.fault = check_plan(lane, *plan.header, -1);
    const bool null_values = (call.values == nullptr && plan.header->tokens > 0) ||
                             (call.row_values == nullptr && plan.header->total > 0);
    if (state.fault == PlanFault::none && null_values)
      state.fault = call.operation == Operation::combine ? PlanFault::weights : PlanFault::null_values;
  }
  __syncthreads();
  if (state.failed) return;
  if (state.fault == PlanFault::none) {
    run_route_values(call, &state, plan);
  } else if (blockIdx.x == 0) {
    if (call.phase != Phase::receive)
      refuse_plan(lane, call.operation, state.number, *plan.header, state.fault, -1, &state.refusal);
    if (call.phase != Phase::send) drain_headers(lane, state.number, call.operation);
  }
  if (call.phase != Phase::send && !call.continues) store_call_number(lane, state.number);
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

}  // namespace

const Kernel<MetadataArguments> kMetadataKernels[3] = {
    {&metadata_kernel<Phase::fused>, 32, "launch metadata"},
    {&metadata_kernel<Phase::send>, 32, "post a count"},
    {&metadata_kernel<Phase::receive>, 32, "launch metadata"}};
const Kernel<RouteValuesArguments> kRouteValuesKernel{&route_values_kernel, 32 * kValueWarps,
                                                      "launch route_values"};
const Kernel<RefusalArguments> kRefusalKernel{&refusal_kernel<true>, 32, "launch a refusal"};
const Kernel<RefusalArguments> kPostRefusalKernel{&refusal_kernel<false>, 32, "post a refusal"};

}  // namespace ferry::cuda
