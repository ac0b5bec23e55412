// The kernels of combine. The first blocks of a fused launch send, the others send the weights that others
// need and bring home; the last warp of the first of those waits for the letters. A launch of one block does
// one after the other.
#include "backends/cuda/combine/combine.hpp"

#include "backends/cuda/combine/combine_reduce.cuh"
#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {
namespace {

constexpr int kWeightsBarrier = 1;
constexpr int kStreamsBytes = kCombineWarps * SumStream::kBytes;

// Of the warps that move rows. Asynchronous loads to where no line begins take longer.
extern __shared__ __align__(128) std::byte stream_memory[];

// Which blocks of a launch do what.
template <Phase kPhase>
struct Roles {
  static constexpr bool kSends = kPhase != Phase::receive, kReceives = kPhase != Phase::send;
  int senders, homes, home;  // home: this block's number among those that bring rows home
  bool sends, receives;

  __device__ explicit Roles(const CombineArguments& call) {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const bool apart = kSends && kReceives && blocks > 1;
    senders = apart ? call.senders : blocks;
    homes = apart ? blocks - senders : blocks;
    home = block - (blocks - homes);
    sends = kSends && block < senders;
    receives = kReceives && home >= 0;
  }
};

struct BlockState {
  CombineArguments call;
  PlanHeader header;  // of the plan
  FlagPublisher<kCombineWarps> publisher;
  HeaderContent call_header;
  ErrorRecord refusal;
  std::uint64_t number;
  bool failed;
  PlanFault fault;
};

// The caller's arguments that only the plan gives a meaning.
__device__ PlanFault fault_of_call(const CombineArguments& call, const PlanHeader& header) {
  const PlanFault fault = fault_of(call.lane, header, -1);
  if (fault != PlanFault::none || header.total == 0 || header.tokens == 0) return fault;
  if ((call.outputs == nullptr) != (call.result == nullptr)) return PlanFault::outputs_and_result;
  if ((call.row_values == nullptr) != (call.route_values == nullptr)) return PlanFault::values;
  return PlanFault::none;
}

// By one thread.
__device__ void fill_header(const CombineArguments& call, const PlanHeader& header, HeaderContent* out) {
  const bool rows = header.total > 0, tokens = header.tokens > 0;
  out->terms.add(static_cast<std::int64_t>(header.call));
  out->facts = facts_of(Operation::combine, header.tokens);
  auto& argument = out->facts.argument;
  if (rows || tokens) {
    argument[0] = rows ? call.outputs != nullptr : call.result != nullptr;
    argument[1] = rows ? call.row_values != nullptr : call.route_values != nullptr;
  }
  if (rows) argument[2] = call.weights != nullptr;
}

// Messages from the rank that is this thread's, and to it, as the plan has them.
struct MessageCounts {
  std::int32_t came = 0, gone = 0;

  __device__ __forceinline__ explicit MessageCounts(const CombineArguments& call) {
    const int peer = static_cast<int>(threadIdx.x % 32), ranks = call.lane.ranks, rank = call.lane.rank;
    if (peer >= ranks) return;
    came = call.plan.tokens_between[peer * ranks + rank];
    gone = call.plan.tokens_between[rank * ranks + peer];
  }
};

// By the working warps of block `number` of `blocks`, before anything that waits: the weights that others
// need for their sums.
__device__ __forceinline__ void send_weights(const CombineArguments& call, std::uint64_t call_number,
                                             std::int32_t gone, int number, int blocks) {
  const LaneView& lane = call.lane;
  const int peer = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool sent_to = peer < lane.ranks && (call.own_staged || peer != lane.rank);
  const std::int32_t messages = sent_to ? usable_messages(lane, gone, lane.rank, peer) : 0;
  send_values(lane, call_number, call.topk_weights,
              ValueTurns(lane, messages, warp * blocks + number, blocks * kCombineWarps), call.plan);
  sync_threads_of(kWeightsBarrier, 32 * kCombineWarps);
  if (threadIdx.x == 0) finish_sending(lane, call_number, blocks, Payload::weights);
}

template <Phase kPhase, class Traits>
__device__ __forceinline__ void work(const CombineArguments& call, BlockState* state,
                                     const MessageCounts& counts) {
  using Role = Roles<kPhase>;
  const Role role(call);
  const LaneView& lane = call.lane;
  const int warp = static_cast<int>(threadIdx.x / 32), block = static_cast<int>(blockIdx.x);
  const std::uint64_t number = state->number;
  const bool works = warp < kCombineWarps;
  std::byte* const memory = stream_memory + warp * SumStream::kBytes;
  if (role.sends && block == 0 && !works) post_head(lane, number, state->call_header);
  // Blocks that bring home have nothing else to do yet.
  if (Role::kSends && weights_travel<Traits>(call) && works && role.home >= 0)
    send_weights(call, number, counts.gone, role.home, role.homes);
  if (role.sends && works) {
    send_results<Traits>(call, number, warp * role.senders + block, role.senders * kCombineWarps, counts.came,
                         &state->publisher, memory);
  } else if (role.sends) {
    state->publisher.run(lane, number);
    if (threadIdx.x % 32 == 0) finish_sending(lane, number, role.senders);
  }
  if (!role.receives) return;
  if (works) {
    bring_home<Traits>(call, number, warp * role.homes + role.home, role.homes * kCombineWarps, counts.gone,
                       memory);
  } else if (role.home == 0) {
    HeaderFacts theirs;
    await_headers(lane, number, state->call_header, true, &theirs);
  }
}

// By the whole block: what it knows at first. False: the exchange has failed.
__device__ __forceinline__ bool start_block(const CombineArguments& arguments, BlockState* state) {
  // What lies in the device's memory is asked for first, all at once.
  const unsigned thread = threadIdx.x;
  std::uint64_t calls = 0;
  bool failed = false;
  if (thread == 0) calls = arguments.lane.state->calls[blockIdx.x];
  if (thread == 32) failed = has_ended(arguments.lane, kFailed);
  const unsigned word = thread - 64;
  if (word < sizeof(PlanHeader) / 8)
    reinterpret_cast<std::uint64_t*>(&state->header)[word] =
        reinterpret_cast<const std::uint64_t*>(arguments.plan.header)[word];
  copy_to_shared(arguments, &state->call, thread, blockDim.x);
  copy_to_shared(arguments.terms, &state->call_header.terms, thread, blockDim.x);
  state->publisher.prepare();
  __syncthreads();
  if (thread == 0) {
    state->number = calls + 1;
    state->call.plan.header = &state->header;
  }
  if (thread == 32) state->failed = failed;
  if (thread == 64) state->fault = fault_of_call(state->call, state->header);
  if (thread == 96) fill_header(state->call, state->header, &state->call_header);
  __syncthreads();
  return !state->failed;
}

template <Phase kPhase, class Traits>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ BlockState state;
  // Asked for before anything else is known.
  const MessageCounts counts(arguments);
  if (!start_block(arguments, &state)) return;
  const CombineArguments& call = state.call;
  const LaneView& lane = call.lane;
  if (state.fault == PlanFault::none) {
    work<kPhase, Traits>(call, &state, counts);
  } else if (blockIdx.x == 0) {
    if (kPhase != Phase::receive) {
      refuse_plan(lane, Operation::combine, state.number, *call.plan.header, state.fault, -1, &state.refusal);
    }
    if (kPhase != Phase::send) await_all(lane, state.number, Operation::combine);
  }
  if (kPhase != Phase::send) end_block(lane, state.number);
}

template <Phase kPhase, class Traits>
const void* kernel() {
  return reinterpret_cast<const void*>(&combine_kernel<kPhase, Traits>);
}

template <Reduction kReduction, bool kWeights>
const void* specialised_kernel(DType type) {
  switch (type) {
    case DType::bf16:
      return kernel<Phase::fused, SpecialisedCombine<kReduction, DType::bf16, kWeights>>();
    case DType::fp16:
      return kernel<Phase::fused, SpecialisedCombine<kReduction, DType::fp16, kWeights>>();
    case DType::fp32:
      break;
  }
  return kernel<Phase::fused, SpecialisedCombine<kReduction, DType::fp32, kWeights>>();
}

const void* kernel_of(const CombineArguments& call, Phase phase) {
  if (phase == Phase::send) return kernel<Phase::send, GenericCombine>();
  if (phase == Phase::receive) return kernel<Phase::receive, GenericCombine>();
  const bool one_type = call.output_type == call.wire && call.result_type == call.wire;
  const bool rows_alone = call.row_values == nullptr && call.route_values == nullptr;
  if (!one_type || !rows_alone || call.reduction == Reduction::unreduced)
    return kernel<Phase::fused, GenericCombine>();
  if (call.reduction == Reduction::exact) return specialised_kernel<Reduction::exact, false>(call.wire);
  return call.weights_travel ? specialised_kernel<Reduction::partial, true>(call.wire)
                             : specialised_kernel<Reduction::partial, false>(call.wire);
}

}  // namespace

void prepare_combine() {
  for (const void* any : {kernel<Phase::send, GenericCombine>(), kernel<Phase::receive, GenericCombine>(),
                          kernel<Phase::fused, GenericCombine>()})
    allow_shared_bytes(any, kStreamsBytes);
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    allow_shared_bytes(specialised_kernel<Reduction::exact, false>(type), kStreamsBytes);
    allow_shared_bytes(specialised_kernel<Reduction::partial, false>(type), kStreamsBytes);
    allow_shared_bytes(specialised_kernel<Reduction::partial, true>(type), kStreamsBytes);
  }
}

void launch_combine(const CombineArguments& arguments, Phase phase, const LaunchShape& shape,
                    cudaStream_t stream) {
  launch(kernel_of(arguments, phase), const_cast<CombineArguments*>(&arguments), kCombineThreads,
         kStreamsBytes, shape, stream, "launching combine");
}

}  // namespace ferry::cuda
