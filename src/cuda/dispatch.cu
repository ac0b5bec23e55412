// The kernels of dispatch. The first blocks of a fused launch send, the others receive; the last of those
// that send speaks for the rank. A launch of one block does one after the other.
#include "cuda/dispatch.hpp"

#include "cuda/dispatch_speak.cuh"

namespace ferry::cuda {
namespace {

// Which blocks of a launch do what.
template <Halves kHalves>
struct Roles {
  static constexpr bool kSends = kHalves != Halves::receive, kReceives = kHalves != Halves::send;
  static constexpr bool kFused = kSends && kReceives;
  int senders, receivers;
  bool apart;  // a block either sends or receives
  bool sends, receives, speaks;

  __device__ explicit Roles(const DispatchArguments& call) {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    apart = kFused && blocks > 1;
    senders = apart ? call.senders : min(blocks, kMaxSenders);
    receivers = apart ? blocks - senders : blocks;
    sends = kSends && block < senders;
    receives = kReceives && block >= blocks - receivers;
    speaks = kReceives && block == (apart ? senders - 1 : blocks - receivers);
  }
  // Neighbouring messages go to different blocks.
  __device__ int receiver() const {
    const int block = static_cast<int>(blockIdx.x) - (static_cast<int>(gridDim.x) - receivers);
    return static_cast<int>(threadIdx.x / 32) * receivers + block;
  }
};

template <Halves kHalves>
struct Block {
  using Role = Roles<kHalves>;

  BlockState* state;
  const Role role;

  __device__ const DispatchArguments& call() const { return state->call; }
  __device__ static int block() { return static_cast<int>(blockIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }

  // By the whole block: its counts, and if it is the first the letters.
  __device__ void announce() const {
    const bool replay = call().replay;
    if (!replay) count_routes(state, block(), role.senders);
    if (block() != 0) return;
    post_letters(call().lane, state->number, state->letter, replay ? nullptr : state->counts.all(), thread(),
                 threads());
    if (thread() != 0 || replay) return;
    keep_bad_ids(call(), state->bad);
    if (!Role::kReceives) start_plan_header(call().plan.header, state->tokens);
  }

  // By the whole block: all it sends, and the flags for it.
  __device__ void send(bool waits) const {
    if (warp() < kWorkWarps) {
      if (call().replay) return send_by_plan(state, block(), role.senders, waits);
      return send_tokens(state, block(), waits);
    }
    state->announcer.run(call().lane, state->number);
  }

  // The last word, by the thread that has announced; the others go on. Only damaged plans make anybody wait
  // for it, and there every rank does: it comes before this one waits for rows.
  __device__ void finish() const {
    if (role.sends && thread() == 32 * kWorkWarps) finish_sending(call().lane, state->number, role.senders);
  }

  // The plan's rows of the tokens that were sent before their rows were known.
  __device__ void finish_plan() const {
    if (call().replay || warp() >= kWorkWarps) return;
    const int worker = block() * kWorkWarps + warp();
    std::int32_t begin, end;
    if (Role::kSends) {
      // The first share of a token's row has made its entries.
      const SendShare share = state->share;
      const int up = (1 << share.splits) - 1;
      begin = (share.unit_begin(worker) + up) >> share.splits;
      end = (share.unit_begin(worker + 1) + up) >> share.splits;
    } else {
      const auto tokens = static_cast<std::int32_t>(state->tokens);
      const int workers = static_cast<int>(gridDim.x) * kWorkWarps, each = (tokens + workers - 1) / workers;
      begin = min(worker * each, tokens);
      end = min(begin + each, tokens);
    }
    finish_routes(call().lane, state->tables, state->places, call().plan, begin, end);
  }

  __device__ void receive() const {
    if (!receive_tokens(state, role.receiver(), role.receivers * kBlockWarps))
      clear_arrivals(call(), thread() % 32, 32);
  }

  // Rows between groups: by blocks that have sent and are done, where there are such.
  __device__ void pad() const {
    const int first = role.apart ? block() * kBlockWarps : role.receiver();
    write_padding(call(), state->places, role.apart ? first + warp() : first,
                  (role.apart ? role.senders : role.receivers) * kBlockWarps, call().plan);
  }

  // Counts, then rows that need no places, then places, then rows that do, then what has come.
  __device__ void take_part() const {
    const bool waits = Role::kFused && state->letter.facts.places_rows;
    bool placed = false;
    if (role.sends) announce();
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      if (role.sends && waits == (step == 1) && (step == 0 || placed)) send(waits);
      if (!Role::kReceives) return finish();
      __syncthreads();
      if (step == 0) placed = await_places(state, role.speaks);
    }
    if (!placed) {
      finish();
      if (!role.speaks) return;
      clear_arrivals(call(), thread(), threads());
      if (thread() == 0) publish_totals(call().lane, state->number, 0);
      return;
    }
    if (role.speaks) publish_places(*state);
    if ((role.sends && !waits) || !Role::kSends) finish_plan();
    finish();
    if (role.receives) receive();
    if (!role.apart || role.sends) pad();
  }

  // A plan that cannot be used: block 0 says so.
  __device__ void refuse() const {
    if (block() != 0) return;
    const LaneView& lane = call().lane;
    if (Role::kSends)
      refuse_plan(lane, Operation::dispatch, state->number, *call().plan.header, state->fault, state->tokens,
                  &state->refusal);
    if (!Role::kReceives) return;
    await_all(lane, state->number, Operation::dispatch);
    clear_arrivals(call(), thread(), threads());
    if (thread() == 0) publish_totals(lane, state->number, 0);
  }
};

// By the whole block: what it knows at first. False: the exchange has failed.
template <Halves kHalves>
__device__ __forceinline__ bool start_block(const DispatchArguments& arguments, BlockState* state,
                                            const Roles<kHalves>& role) {
  using Role = Roles<kHalves>;
  // What lies in the device's memory is asked for first, all at once.
  const unsigned thread = threadIdx.x;
  std::uint64_t calls = 0;
  std::int64_t tokens = 0;
  bool failed = false;
  if (thread == 0) {
    calls = arguments.lane.state->calls[blockIdx.x];
    if (!Role::kSends) tokens = arguments.plan.header->tokens;
    if (Role::kSends && arguments.device_tokens != nullptr) tokens = *arguments.device_tokens;
  }
  if (thread == 32) failed = has_ended(arguments.lane, kFailed);
  copy_tables(arguments.lane, state->tables_memory());
  copy_to_shared(arguments, &state->call);
  copy_to_shared(arguments.terms, &state->letter.terms);
  state->announcer.prepare();
  state->scratch.prepare();
  if (thread == 64) state->lay_out(arguments.lane);
  __syncthreads();
  if (Role::kSends && role.sends && !arguments.replay) state->counts.clear(arguments.lane.signals);
  if (thread == 32) state->failed = failed;
  if (thread == 0) {
    state->number = calls + 1;
    state->tokens = Role::kSends ? tokens_of(state->call, state->number, tokens, blockIdx.x == 0) : tokens;
    state->share = SendShare::of(state->tokens, role.senders);
    state->bad = {0, ~0ull};
    state->takers = state->placers = 0;
    state->fault = state->call.replay ? fault_of(state->call.lane, *state->call.plan.header, state->tokens)
                                      : PlanFault::none;
    fill_letter(state, Role::kFused);
  }
  __syncthreads();
  return !state->failed;
}

template <Halves kHalves>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchArguments arguments) {
  extern __shared__ __align__(16) std::byte memory[];
  auto* state = reinterpret_cast<BlockState*>(memory);
  const Roles<kHalves> role(arguments);
  if (!start_block(arguments, state, role)) return;
  const Block<kHalves> block{state, role};
  if (state->fault == PlanFault::none) {
    block.take_part();
  } else {
    block.refuse();
  }
  if (kHalves != Halves::send) end_block(state->call.lane, state->number);
}

const void* kernel_of(Halves halves) {
  switch (halves) {
    case Halves::send:
      return reinterpret_cast<const void*>(&dispatch_kernel<Halves::send>);
    case Halves::receive:
      return reinterpret_cast<const void*>(&dispatch_kernel<Halves::receive>);
    case Halves::both:
      break;
  }
  return reinterpret_cast<const void*>(&dispatch_kernel<Halves::both>);
}

}  // namespace

void prepare_dispatch(const LaneView& lane) {
  for (const Halves halves : {Halves::both, Halves::send, Halves::receive})
    allow_shared_bytes(kernel_of(halves), BlockState::bytes(lane));
}

void launch_dispatch(const DispatchArguments& arguments, Halves halves, const LaunchShape& shape,
                     cudaStream_t stream) {
  launch(kernel_of(halves), const_cast<DispatchArguments*>(&arguments), kBlockThreads,
         static_cast<std::size_t>(BlockState::bytes(arguments.lane)), shape, stream, "launching dispatch");
}

}  // namespace ferry::cuda
