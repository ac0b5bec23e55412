// The kernels of dispatch. Block 0 speaks for the rank: it counts, exchanges letters and computes places; its
// warps then receive. The others send with some warps and receive with the rest.
#include "cuda/dispatch.hpp"

#include "cuda/dispatch_speak.cuh"

namespace ferry::cuda {
namespace {

// How many warps do what. Quantising is work for many warps with one stage each; moving rows is work for the
// copy engine, which a few warps with two stages each keep busy. Planning warps have no stage.
template <bool kEncodes>
struct Crew {
  static constexpr int kMove = kEncodes ? 8 : 4, kReceive = kEncodes ? 4 : 6;
  static constexpr int kWarps = kPlanWarps + kMove + kReceive, kThreads = 32 * kWarps;
  static constexpr int kMoveStages = kEncodes ? 1 : 2;  // of a warp
  static constexpr int kStages = kMove * kMoveStages + kReceive;
};
static_assert(sizeof(PlacesScratch) <= kStageBytes);
static_assert(Crew<false>::kStages <= kMaxStages && Crew<true>::kStages <= kMaxStages);

constexpr std::int64_t kStateBytes = (sizeof(BlockState) + 127) / 128 * 128;

// Stages first, then the state, then the tables.
constexpr std::int64_t kStagesBytes = kMaxStages * std::int64_t{kStageBytes};

std::int64_t shared_bytes(const LaneView& lane) {
  return kStagesBytes + kStateBytes + RoutingTables::bytes(lane.experts, lane.ranks);
}

// Which warps of a launch do what. Block 0 speaks and then receives; if it is the only one, it sends in
// between.
template <Halves kHalves, bool kEncodes>
struct Roles : Crew<kEncodes> {
  using Crew<kEncodes>::kWarps;
  using Crew<kEncodes>::kMove;
  static constexpr bool kSends = kHalves != Halves::receive, kReceives = kHalves != Halves::send;
  static constexpr int kStaged = kWarps - kPlanWarps;                    // warps with a stage
  static constexpr int kReceiving = kSends ? kStaged - kMove : kStaged;  // of a block that is not the first

  __device__ static bool alone() { return gridDim.x == 1; }
  __device__ static int senders() { return alone() ? 1 : static_cast<int>(gridDim.x) - 1; }
  __device__ static int sender() { return alone() ? 0 : static_cast<int>(blockIdx.x) - 1; }
  __device__ static bool plans(int warp) { return kSends && warp < kPlanWarps; }
  __device__ static bool moves(int warp) { return kSends && warp >= kPlanWarps && warp < kPlanWarps + kMove; }
  __device__ static bool waits(int warp) { return warp >= kPlanWarps + kMove; }
  __device__ static bool receives(int warp) {
    return kReceives && warp >= kWarps - (blockIdx.x == 0 ? kStaged : kReceiving);
  }
  // Block 0, which comes late to it, last; neighbouring messages to different blocks.
  __device__ static int receivers() { return kStaged + static_cast<int>(gridDim.x - 1) * kReceiving; }
  __device__ static int receiver(int warp) {
    const int others = static_cast<int>(gridDim.x) - 1;
    if (blockIdx.x == 0) return others * kReceiving + warp - kPlanWarps;
    return (warp - (kWarps - kReceiving)) * others + static_cast<int>(blockIdx.x) - 1;
  }
  __device__ static int receiving_threads() { return 32 * (blockIdx.x == 0 ? kStaged : kReceiving); }
};

template <Halves kHalves, bool kEncodes>
struct Block {
  using Role = Roles<kHalves, kEncodes>;

  const DispatchArguments& call;
  BlockState* state;
  RoutingTables tables;
  PlanView plan;
  PlacesScratch* places;
  std::byte* count_memory;          // for counts of a share of the tokens: a receiving warp's stage
  Stage stages[Role::kMoveStages];  // of this warp; receiving warps use the first

  __device__ int warp() const { return threadIdx.x / 32; }
  __device__ SendShare share() const { return SendShare::of(Role::sender(), Role::senders(), state->tokens); }

  __device__ void move() {
    const int mover = warp() - kPlanWarps;
    if (!call.replay) {
      // What was counted from ids is what is sent: only a plan can promise more.
      Mover<kEncodes, Role::kMove, Role::kMoveStages>{call,         state->number, state->tokens, share(),
                                                      &state->send, mover,         stages}
          .move_all();
      return;
    }
    send_by_plan(call, state->number, state->tokens, Role::sender() * Role::kMove + mover,
                 Role::senders() * Role::kMove, plan, stages[0]);
    sync_threads_of(kMoveBarrier, 32 * Role::kMove);
    if (mover == 0 && threadIdx.x % 32 == 0) finish_sending(call.lane, state->number, Role::senders());
  }

  __device__ void send() {
    if (Role::plans(warp()) && !call.replay) {
      plan_tokens(call, state->tokens, share(), tables, plan, &state->send);
    }
    if (Role::moves(warp())) move();
  }

  // By the planning warps, in a fused call: rows of the routes they have planned.
  __device__ void finish_own_routes() {
    const SendShare mine = share();
    for (std::int64_t round = 0; mine.first(round) < state->tokens; ++round) {
      const std::int64_t first = mine.first(round), end = min(first + mine.width, state->tokens);
      finish_routes(call.lane, plan, end, static_cast<int>(first) + warp(), kPlanWarps);
    }
  }

  // By the warps that have nothing to receive yet.
  __device__ void count() {
    constexpr int kThreads = 32 * Role::kReceive;
    const int thread = static_cast<int>(threadIdx.x) + kThreads - 32 * Role::kWarps;
    const RoutingTables own =
        RoutingTables::at(count_memory, call.lane.experts, call.lane.ranks).with(tables);
    count_share(call, state, own, thread, kThreads, kReceiveBarrier);
  }

  __device__ bool await_places() {
    // Acquire: places, counts and the plan's header by block 0, before the reads of all threads, which the
    // exchange of the result orders.
    int placed = 0;
    if (threadIdx.x % 32 == 0) placed = wait_here(call.lane, &call.lane.state->placed, state->number);
    __syncwarp();
    return __shfl_sync(~0u, placed, 0) != 0;
  }

  // First rows of this rank's experts, near if they fit. By the receiving warps of the block.
  __device__ const std::int32_t* near_first_rows(int thread, int threads) {
    const LaneView& lane = call.lane;
    const bool rank_major = lane.layout == Layout::rank_major;
    const int first = rank_major ? lane.rank : lane.first_expert[lane.rank];
    const int count = (rank_major ? 1 : lane.first_expert[lane.rank + 1] - first) * lane.ranks;
    const std::int32_t* far = lane.first_rows + std::int64_t{first} * lane.ranks;
    if (count > kNearRows) return far;
    for (int i = thread; i < count; i += threads) state->first_rows[i] = far[i];
    sync_threads_of(kReceiveBarrier, threads);
    return state->first_rows;
  }

  __device__ void receive() {
    const int threads = Role::receiving_threads(),
              thread = static_cast<int>(threadIdx.x) + threads - 32 * Role::kWarps;
    if (!await_places()) return;
    const std::int32_t* first_rows = near_first_rows(thread, threads);
    // A warp that has sent through its stage has done so by its first thread alone.
    stages[0].parity = __shfl_sync(~0u, stages[0].parity, 0);
    const int worker = Role::receiver(warp()), workers = Role::receivers();
    // Routes that no warp of this launch will finish that has planned them.
    if ((!Role::kSends || Role::alone()) && !call.replay) {
      finish_routes(call.lane, plan, state->tokens, worker, workers);
    }
    write_padding(call, worker, workers, plan);
    const int local = call.lane.first_expert[call.lane.rank + 1] - call.lane.first_expert[call.lane.rank];
    const int groups = call.lane.layout == Layout::rank_major ? call.lane.ranks : local;
    take_messages(call, tables, first_rows, state->number, call.row_offsets[groups], worker, workers, plan,
                  stages[0]);
    if (threadIdx.x % 32 == 0) bulk_wait_written();
  }

  // Block 0.
  __device__ void speak() {
    if (Role::kSends) {
      announce_counts(call, state, tables, plan);
      if (!Role::kReceives && !call.replay && threadIdx.x == 0) start_plan_header(plan.header, state->tokens);
    }
    if (Role::kSends && Role::alone()) {
      __syncthreads();
      tables.fill(call.lane);
      __syncthreads();
      send();
      __syncthreads();
    }
    if (!Role::kReceives) return;
    if (!Role::kSends) restore_letter(call.lane, state);
    place_arrivals(call, state, tables, plan, places);
    // The stages are stages again.
    __syncthreads();
    fence_before_bulk();
    if (Role::receives(warp())) receive();
  }

  __device__ void refuse() {
    const PlanHeader& header = *plan.header;
    if (Role::kSends)
      refuse_plan(call.lane, Operation::dispatch, state->number, header, state->fault, state->tokens,
                  &state->refusal);
    if (!Role::kReceives) return;
    await_all(call.lane, state->number, Operation::dispatch);
    clear_arrivals(call);
    if (threadIdx.x == 0) publish_totals(call.lane, state->number, 0);
  }

  __device__ void work() {
    const bool speaks = blockIdx.x == 0;
    if (state->fault != PlanFault::none) {
      if (speaks) refuse();
    } else if (speaks) {
      speak();
    } else {
      send();
      if (Role::kSends && Role::waits(warp()) && counts_together(call, *state)) count();
      if (Role::receives(warp())) receive();
      if (Role::plans(warp()) && Role::kReceives && !call.replay && await_places()) finish_own_routes();
    }
  }
};

template <Halves kHalves, bool kEncodes>
__device__ Block<kHalves, kEncodes> start_block(const DispatchArguments& call, std::byte* memory) {
  using Role = Roles<kHalves, kEncodes>;
  const LaneView& lane = call.lane;
  auto* state = reinterpret_cast<BlockState*>(memory + kStagesBytes);
  const RoutingTables tables =
      RoutingTables::at(memory + kStagesBytes + kStateBytes, lane.experts, lane.ranks);
  const int warp = threadIdx.x / 32;
  Block<kHalves, kEncodes> block{call,
                                 state,
                                 tables,
                                 view_plan(call.plan, lane.plan_shape),
                                 reinterpret_cast<PlacesScratch*>(memory),
                                 memory + (Role::kStages - 1) * kStageBytes,
                                 {}};
  if (warp >= kPlanWarps) {
    const int mover = warp - kPlanWarps, receiver = mover - Role::kMove;
    for (int i = 0; i < Role::kMoveStages; ++i) {
      if (receiver >= 0 && i > 0) break;
      const int stage =
          receiver < 0 ? mover * Role::kMoveStages + i : Role::kMove * Role::kMoveStages + receiver;
      block.stages[i] = Stage{memory + stage * kStageBytes, &state->arrivals[stage]};
      if (threadIdx.x % 32 == 0) arrival_init(&state->arrivals[stage]);
    }
  }
  if (threadIdx.x == 0) state->send.prepare(Role::kMove);
  block.tables.fill(lane);
  if (threadIdx.x % 32 == 0) fence_arrival_init();
  if (threadIdx.x == 0) {
    constexpr bool kSends = kHalves != Halves::receive;
    state->number = lane.state->calls[blockIdx.x] + 1;
    state->tokens = kSends ? tokens_of(call, state->number, blockIdx.x == 0) : block.plan.header->tokens;
    state->bad = {0, ~0ull};
    state->failed = has_ended(lane, kFailed);
    state->fault = call.replay ? fault_of(lane, *block.plan.header, state->tokens) : PlanFault::none;
  }
  __syncthreads();
  return block;
}

template <Halves kHalves, bool kEncodes>
__global__ void __launch_bounds__(Crew<kEncodes>::kThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchArguments call) {
  extern __shared__ __align__(128) std::byte memory[];
  Block<kHalves, kEncodes> block = start_block<kHalves, kEncodes>(call, memory);
  if (block.state->failed) return;
  block.work();
  if (kHalves != Halves::send) end_block(call.lane, block.state->number);
}

template <bool kEncodes>
const void* kernel_of(Halves halves) {
  switch (halves) {
    case Halves::send:
      return reinterpret_cast<const void*>(&dispatch_kernel<Halves::send, kEncodes>);
    case Halves::receive:  // finds everything encoded
      return reinterpret_cast<const void*>(&dispatch_kernel<Halves::receive, false>);
    case Halves::both:
      break;
  }
  return reinterpret_cast<const void*>(&dispatch_kernel<Halves::both, kEncodes>);
}

}  // namespace

void launch_dispatch(const DispatchArguments& arguments, Halves halves, const LaunchShape& shape,
                     cudaStream_t stream) {
  const bool encodes = arguments.format == FormatKind::fp8_e4m3;
  const bool encoding_crew = encodes && halves != Halves::receive;
  launch(encodes ? kernel_of<true>(halves) : kernel_of<false>(halves),
         const_cast<DispatchArguments*>(&arguments),
         encoding_crew ? Crew<true>::kThreads : Crew<false>::kThreads,
         static_cast<std::size_t>(shared_bytes(arguments.lane)), shape, stream, "launching dispatch");
}

}  // namespace ferry::cuda
