// The kernels of combine. The first warp of block 0 speaks for the rank; the others send with some warps and
// bring home with the rest, and with all once a block has sent what it has.
#include "cuda/combine.hpp"

#include "cuda/combine_home.cuh"
#include "cuda/letters.cuh"
#include "cuda/plan_header.cuh"

namespace ferry::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kSendWarps = 10;  // of a fused launch
constexpr int kSendBarrier = 1;

template <Halves kHalves>
struct Roles {
  static constexpr bool kSends = kHalves != Halves::receive, kReceives = kHalves != Halves::send;
  static constexpr int kSending = !kSends ? 0 : kReceives ? kSendWarps : kWarps;
};

struct BlockState {
  LetterContent letter;
  ErrorRecord refusal;
  std::uint64_t number;
  unsigned next_token;
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
  letter->terms = call.terms;
  letter->terms.option[letter->terms.option_count++] = static_cast<std::int64_t>(header.call);
  letter->count = header.tokens;
  const bool either = !rows && !tokens;
  letter->argument[0] = either ? 2 : rows ? call.outputs != nullptr : call.result != nullptr;
  letter->argument[1] = either ? 2 : rows ? call.row_values != nullptr : call.route_values != nullptr;
  letter->argument[2] = !rows ? 2 : call.weights != nullptr;
}

// By the first warp of block 0.
__device__ void speak(const CombineArguments& call, BlockState* state, const PlanView& plan, bool posts,
                      bool awaits) {
  const LaneView& lane = call.lane;
  if (threadIdx.x == 0) fill_letter(call, *plan.header, &state->letter);
  __syncwarp();
  if (posts) post_letters(lane, state->number, state->letter, nullptr);
  if (awaits) await_letters(lane, state->number, state->letter);
}

// By the sending warps, before anything that waits: the weights that others need for their sums.
template <Halves kHalves>
__device__ void send_weights(const CombineArguments& call, const BlockState* state, const PlanView& plan) {
  constexpr int kSending = Roles<kHalves>::kSending;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  send_values(call.lane, state->number, call.home_weights,
              block * kSending + static_cast<int>(threadIdx.x / 32), blocks * kSending, plan);
  sync_threads_of(kSendBarrier, 32 * kSending);
  if (threadIdx.x == 0) finish_sending(call.lane, state->number, blocks, Phase::weights);
}

template <Halves kHalves>
__device__ __forceinline__ void work(const CombineArguments& call, BlockState* state, const PlanView& plan,
                                     RowStream& stream) {
  using Role = Roles<kHalves>;
  const int warp = threadIdx.x / 32, block = static_cast<int>(blockIdx.x),
            blocks = static_cast<int>(gridDim.x);
  const bool speaks = block == 0 && warp == 0;
  if (warp < Role::kSending && call.weights_travel) send_weights<kHalves>(call, state, plan);
  if (speaks) speak(call, state, plan, Role::kSends, Role::kReceives);
  if (warp < Role::kSending) {
    // Block 0's first warp has spoken instead, and may have waited long: it takes no share. Few messages are
    // spread over all blocks.
    const int worker = warp * blocks + block - 1, workers = blocks * Role::kSending - 1;
    if (!speaks) send_results(call, state->number, worker, workers, plan, stream);
    sync_threads_of(kSendBarrier, 32 * Role::kSending);
    if (threadIdx.x == 0) finish_sending(call.lane, state->number, blocks);
  }
  if (Role::kReceives) bring_home(call, state->number, &state->next_token, plan, stream);
}

template <Halves kHalves>
__global__ void __launch_bounds__(kThreads, 1) combine_kernel(const __grid_constant__ CombineArguments call) {
  __shared__ BlockState state;
  const LaneView& lane = call.lane;
  const PlanView plan = view_plan(call.plan, lane.plan_shape);
  if (threadIdx.x % 32 == 0) RowStream::init();
  if (threadIdx.x == 0) {
    state.next_token = 0;
    state.number = lane.state->calls[blockIdx.x] + 1;
    state.failed = has_ended(lane, kFailed);
    state.fault = fault_of_call(call, *plan.header);
  }
  __syncthreads();
  if (state.failed) return;
  if (state.fault == PlanFault::none) {
    RowStream stream;
    work<kHalves>(call, &state, plan, stream);
  } else if (blockIdx.x == 0) {
    if (kHalves != Halves::receive) {
      refuse_plan(lane, Operation::combine, state.number, *plan.header, state.fault, -1, &state.refusal);
    }
    if (kHalves != Halves::send) await_all(lane, state.number, Operation::combine);
  }
  if (kHalves != Halves::send) end_block(lane, state.number);
}

const void* kernel_of(Halves halves) {
  switch (halves) {
    case Halves::send:
      return reinterpret_cast<const void*>(&combine_kernel<Halves::send>);
    case Halves::receive:
      return reinterpret_cast<const void*>(&combine_kernel<Halves::receive>);
    case Halves::both:
      break;
  }
  return reinterpret_cast<const void*>(&combine_kernel<Halves::both>);
}

}  // namespace

void launch_combine(const CombineArguments& arguments, Halves halves, const LaunchShape& shape,
                    cudaStream_t stream) {
  launch(kernel_of(halves), const_cast<CombineArguments*>(&arguments), kThreads,
         kWarps * sizeof(StreamMemory), shape, stream, "launching combine");
}

}  // namespace ferry::cuda
