// For groups of any size.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/operations/small_operations.hpp"

#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/operations/send_values.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "backends/cuda/runtime/run_kernel.cuh"
#include "exchange/backend.hpp"

namespace ferry::cuda {
namespace {

// --- numbers of all ranks --------------------------------------------------------------------------------

// [thread] This rank's number. One that is known on the device only is checked here.
template <class Call>
__device__ std::int32_t number_of(const NumberArguments& call, std::uint64_t call_number) {
  if (call.device_number == nullptr) return call.number;
  const std::int32_t number = *call.device_number, most = Call::most(call.lane.ranks);
  if (number >= 0 && number <= most) return number;
  abort_call(call.lane, call_number, Call::operation, DeviceError::Reason::too_many, call.lane.rank, 0,
             number, most);
  return 0;
}

// [warp] Joins the parts of all threads.
template <class Call>
__device__ void join_threads(typename Call::Result* all) {
  constexpr int kWords = sizeof *all / 4;
  for (int other = 16; other > 0; other /= 2) {
    typename Call::Result part;
    const auto* from = reinterpret_cast<const std::uint32_t*>(all);
    auto* to = reinterpret_cast<std::uint32_t*>(&part);
#pragma unroll
    for (int word = 0; word < kWords; ++word) to[word] = __shfl_xor_sync(~0u, from[word], other);
    Call::join(part, all);
  }
}

struct NumberState {
  NumberArguments call;
  CallHeader header;
};

// [block] Of one warp.
template <class Call, Phase kPhase>
__device__ void run_number_call(const NumberArguments& arguments, NumberState* state) {
  auto& [call, header] = *state;
  copy_to_shared(arguments, &call, threadIdx.x, blockDim.x);
  __syncthreads();
  const LaneView& lane = call.lane;
  if (is_aborted(lane, kExchangeFailed)) return;
  const std::uint64_t number = lane.state->calls[0] + 1;
  const bool first = threadIdx.x == 0;
  if (first) {
    header.terms = call.terms;
    set_epoch(*lane.epoch, &header);
    if constexpr (kPhase != Phase::receive)
      header.facts = make_header_facts(Call::operation, number_of<Call>(call, number));
  }
  __syncwarp();
  if constexpr (kPhase != Phase::receive) post_header(lane, number, header);
  if constexpr (kPhase != Phase::send) {
    typename Call::Result all{};
    const bool agree =
        await_all_headers_wide(lane, number, header, true, [&](int peer, const HeaderFacts& theirs) {
          Call::join(Call::of(theirs.count, peer, lane.rank), &all);
        });
    if (agree) join_threads<Call>(&all);
    if (first) *static_cast<typename Call::Result*>(call.into) = agree ? all : typename Call::Result{};
    store_call_number(lane, number);
  }
}

// In the order of Phase.
template <class Call>
const Kernel<NumberArguments> kNumberKernels[3] = {
    kernel_of<NumberArguments, &run_number_call<Call, Phase::fused>, 32, NumberState>("join numbers"),
    kernel_of<NumberArguments, &run_number_call<Call, Phase::send>, 32, NumberState>("post a number"),
    kernel_of<NumberArguments, &run_number_call<Call, Phase::receive>, 32, NumberState>("join numbers")};

// The kernels of the alternative of SmallCall that is `operation`.
template <class... Calls>
const Kernel<NumberArguments>* number_kernels(Operation operation, const std::variant<Calls...>*) {
  const Kernel<NumberArguments>* found = nullptr;
  (..., [&] {
    if constexpr (JoinsNumbers<Calls>) {
      if (Calls::operation == operation) found = kNumberKernels<Calls>;
    }
  }());
  return found;
}

// --- route values ------------------------------------------------------------------------------------------

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

const Kernel<NumberArguments>& number_kernel(Operation operation, Phase phase) {
  return number_kernels(operation, static_cast<const SmallCall*>(nullptr))[static_cast<int>(phase)];
}
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
