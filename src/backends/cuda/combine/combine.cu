// The kernels of combine. The first blocks of a fused launch send, the others send the weights that others
// need and bring home; the last warp of the first of those waits for the letters. A launch of one block does
// one after the other.
#include "backends/cuda/combine/combine.hpp"

#include "backends/cuda/combine/combine_home.cuh"
#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/protocol/letters.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {
namespace {

constexpr int kWeightsBarrier = 1;
constexpr int kStreamsBytes = kCombineWarps * SumStream::kBytes;

// Of the warps that move rows. Asynchronous loads to where no line begins take longer.
extern __shared__ __align__(128) std::byte stream_memory[];

// Which blocks of a launch do what.
template <Halves kHalves>
struct Roles {
  static constexpr bool kSends = kHalves != Halves::receive, kReceives = kHalves != Halves::send;
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
  Announcer<kCombineWarps> announcer;
  LetterContent letter;
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
__device__ void fill_letter(const CombineArguments& call, const PlanHeader& header, LetterContent* letter) {
  const bool rows = header.total > 0, tokens = header.tokens > 0;
  letter->terms.add(static_cast<std::int64_t>(header.call));
  letter->facts = facts_of(Operation::combine, header.tokens);
  auto& argument = letter->facts.argument;
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
  send_values(lane, call_number, call.home_weights,
              ValueTurns(lane, messages, warp * blocks + number, blocks * kCombineWarps), call.plan);
  sync_threads_of(kWeightsBarrier, 32 * kCombineWarps);
  if (threadIdx.x == 0) finish_sending(lane, call_number, blocks, Phase::weights);
}

template <Halves kHalves, class Known>
__device__ __forceinline__ void work(const CombineArguments& call, BlockState* state,
                                     const MessageCounts& counts) {
  using Role = Roles<kHalves>;
  const Role role(call);
  const LaneView& lane = call.lane;
  const int warp = static_cast<int>(threadIdx.x / 32), block = static_cast<int>(blockIdx.x);
  const std::uint64_t number = state->number;
  const bool works = warp < kCombineWarps;
  std::byte* const memory = stream_memory + warp * SumStream::kBytes;
  if (role.sends && block == 0 && !works) post_head(lane, number, state->letter);
  // Blocks that bring home have nothing else to do yet.
  if (Role::kSends && weights_travel<Known>(call) && works && role.home >= 0)
    send_weights(call, number, counts.gone, role.home, role.homes);
  if (role.sends && works) {
    send_results<Known>(call, number, warp * role.senders + block, role.senders * kCombineWarps, counts.came,
                        &state->announcer, memory);
  } else if (role.sends) {
    state->announcer.run(lane, number);
    if (threadIdx.x % 32 == 0) finish_sending(lane, number, role.senders);
  }
  if (!role.receives) return;
  if (works) {
    bring_home<Known>(call, number, warp * role.homes + role.home, role.homes * kCombineWarps, counts.gone,
                      memory);
  } else if (role.home == 0) {
    LetterFacts theirs;
    await_letters(lane, number, state->letter, true, &theirs);
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
  copy_to_shared(arguments.terms, &state->letter.terms, thread, blockDim.x);
  state->announcer.prepare();
  __syncthreads();
  if (thread == 0) {
    state->number = calls + 1;
    state->call.plan.header = &state->header;
  }
  if (thread == 32) state->failed = failed;
  if (thread == 64) state->fault = fault_of_call(state->call, state->header);
  if (thread == 96) fill_letter(state->call, state->header, &state->letter);
  __syncthreads();
  return !state->failed;
}

template <Halves kHalves, class Known>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ BlockState state;
  // Asked for before anything else is known.
  const MessageCounts counts(arguments);
  if (!start_block(arguments, &state)) return;
  const CombineArguments& call = state.call;
  const LaneView& lane = call.lane;
  if (state.fault == PlanFault::none) {
    work<kHalves, Known>(call, &state, counts);
  } else if (blockIdx.x == 0) {
    if (kHalves != Halves::receive) {
      refuse_plan(lane, Operation::combine, state.number, *call.plan.header, state.fault, -1, &state.refusal);
    }
    if (kHalves != Halves::send) await_all(lane, state.number, Operation::combine);
  }
  if (kHalves != Halves::send) end_block(lane, state.number);
}

template <Halves kHalves, class Known>
const void* kernel() {
  return reinterpret_cast<const void*>(&combine_kernel<kHalves, Known>);
}

template <Reduction kReduction, bool kWeights>
const void* plain_kernel(DType type) {
  switch (type) {
    case DType::bf16:
      return kernel<Halves::both, PlainCombine<kReduction, DType::bf16, kWeights>>();
    case DType::fp16:
      return kernel<Halves::both, PlainCombine<kReduction, DType::fp16, kWeights>>();
    case DType::fp32:
      break;
  }
  return kernel<Halves::both, PlainCombine<kReduction, DType::fp32, kWeights>>();
}

const void* kernel_of(const CombineArguments& call, Halves halves) {
  if (halves == Halves::send) return kernel<Halves::send, AnyCombine>();
  if (halves == Halves::receive) return kernel<Halves::receive, AnyCombine>();
  const bool one_type = call.output_type == call.wire && call.result_type == call.wire;
  const bool rows_alone = call.row_values == nullptr && call.route_values == nullptr;
  if (!one_type || !rows_alone || call.reduction == Reduction::unreduced)
    return kernel<Halves::both, AnyCombine>();
  if (call.reduction == Reduction::exact) return plain_kernel<Reduction::exact, false>(call.wire);
  return call.weights_travel ? plain_kernel<Reduction::partial, true>(call.wire)
                             : plain_kernel<Reduction::partial, false>(call.wire);
}

}  // namespace

void prepare_combine() {
  for (const void* any : {kernel<Halves::send, AnyCombine>(), kernel<Halves::receive, AnyCombine>(),
                          kernel<Halves::both, AnyCombine>()})
    allow_shared_bytes(any, kStreamsBytes);
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32}) {
    allow_shared_bytes(plain_kernel<Reduction::exact, false>(type), kStreamsBytes);
    allow_shared_bytes(plain_kernel<Reduction::partial, false>(type), kStreamsBytes);
    allow_shared_bytes(plain_kernel<Reduction::partial, true>(type), kStreamsBytes);
  }
}

void launch_combine(const CombineArguments& arguments, Halves halves, const LaunchShape& shape,
                    cudaStream_t stream) {
  launch(kernel_of(arguments, halves), const_cast<CombineArguments*>(&arguments), kCombineThreads,
         kStreamsBytes, shape, stream, "launching combine");
}

}  // namespace ferry::cuda
