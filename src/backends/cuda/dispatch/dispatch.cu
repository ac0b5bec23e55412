// The kernels of dispatch. The first blocks of a fused launch send, the last receive; the last of the others
// coordinates for the rank. Between them, where tokens are few, some tell of the tokens: they count, write
// notes and keep the plan, and those that send only send. A launch of one block does one after the other.
#include "backends/cuda/dispatch/dispatch.hpp"

#include <array>

#include "backends/cuda/dispatch/dispatch_coordinator.cuh"

namespace ferry::cuda {
namespace {

// Which blocks of a launch do what.
template <Phase kPhase, bool kByToken>
struct Roles {
  static constexpr bool kSends = kPhase != Phase::receive, kReceives = kPhase != Phase::send;
  static constexpr bool kFused = kSends && kReceives;
  int senders, metadata_blocks, receivers;
  bool apart;  // a block has one role
  bool sends, keeps, receives, coordinates;

  __device__ explicit Roles(const DispatchArguments& call) {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    apart = kFused && blocks > 1;
    senders = min(blocks, kMaxSenders);
    if (apart) senders = kByToken ? call.by_token.senders : call.by_number.senders;
    metadata_blocks = kByToken ? call.by_token.metadata_blocks : 0;
    receivers = apart ? blocks - senders - metadata_blocks : blocks;
    sends = kSends && block < senders;
    keeps = block >= senders && block < senders + metadata_blocks;
    receives = kReceives && block >= blocks - receivers;
    coordinates = kReceives && block == (apart ? senders + metadata_blocks - 1 : blocks - receivers);
  }
  // Whoever tells of tokens counts them.
  __device__ bool counts() const { return keeps || (sends && metadata_blocks == 0); }
  // Of blocks with this role, this block's number, and how many share the tokens.
  __device__ int counter() const { return static_cast<int>(blockIdx.x) - (keeps ? senders : 0); }
  __device__ int counters() const { return keeps ? metadata_blocks : senders; }
  // Nobody counts after this block: it knows what the letter says. In a launch of both halves it also
  // coordinates, so that it does not end the call, by other ranks' letters, before it has added up what all
  // count.
  __device__ bool writes() const { return static_cast<int>(blockIdx.x) == senders + metadata_blocks - 1; }
  // Neighbouring messages go to different blocks.
  __device__ int receiver() const {
    const int block = static_cast<int>(blockIdx.x) - (static_cast<int>(gridDim.x) - receivers);
    return static_cast<int>(threadIdx.x / 32) * receivers + block;
  }
};

template <Phase kPhase, class Traits>
struct Block {
  using Role = Roles<kPhase, Traits::kByToken>;

  const DispatchArguments& call;
  const Role role;
  BlockState* const state;

  __device__ explicit Block(const DispatchArguments& of) : call(of), role(of), state(block_state()) {}

  __device__ static int block() { return static_cast<int>(blockIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }

  // By the whole block: what it knows at first. False: the exchange has failed. Each warp asks for something
  // else that lies in the device's memory, so that all of it is on its way at once; and then for what it
  // needs first of the caller's, if that can be asked for already. `share`: of those that send; where
  // messages lie by number, of as many tokens as there can be.
  __device__ __forceinline__ bool start(const SendPartition& share, CountedIds* counted,
                                        SlotRoute* first) const {
    fetch_lines(call);
    TableWords tables;
    tables.load(call.lane);
    std::uint64_t calls = 0;
    bool failed = false;
    if (thread() == 0) calls = call.lane.state->calls[block()];
    if (thread() == 32) failed = has_ended(call.lane, kFailed);
    if (role.counts() && !Traits::replays(call)) *counted = CountedIds::of(call, 0, share.tokens);
    if (role.sends && Traits::kByToken && warp() < kWorkWarps) *first = first_routes(share);
    if (thread() == 64) start_tokens();
    if (warp() == 3) start_terms();
    state->publisher.prepare();
    state->scratch.prepare();
    if (role.counts() && !Traits::replays(call)) counts_of(call).clear(call.lane.signals);
    if (thread() == 0) state->number = calls + 1;
    if (thread() == 32) state->failed = failed;
    tables.store(call.lane, block_memory + call.shared.tables);
    __syncthreads();
    return !state->failed;
  }

  // By one thread: how many tokens there are, and what the letter says of them.
  __device__ void start_tokens() const {
    const bool known = Role::kSends && call.device_tokens == nullptr;
    std::int64_t tokens = call.tokens;
    if (!known) tokens = Role::kSends ? tokens_of(call, block() == 0) : call.plan.header->tokens;
    const SendPartition share = known ? call.share : SendPartition::of(tokens, role.senders);
    state->tokens = tokens;
    state->share = share;
    // The one that coordinates has enough to do.
    if (role.keeps) state->share = known ? call.told : SendPartition::whole(tokens, role.metadata_blocks - 1);
    state->bad = {0, ~0ull};
    state->direct_write_peers = state->direct_writers = 0;
    state->fault = Traits::replays(call) ? fault_of(call.lane, *call.plan.header, tokens) : PlanFault::none;
    fill_facts(call, share, Role::kFused, Traits::kByToken);
  }
  // By one warp: what the letter says of the call.
  __device__ void start_terms() const {
    copy_to_shared(call.terms, &state->header.terms, thread() % 32, 32);
    __syncwarp();
    if (Traits::replays(call) && thread() % 32 == 0)
      state->header.terms.add(static_cast<std::int64_t>(call.plan.header->call));
  }

  // By the whole block: its counts, and if it is the last that counts all of them: it has the fewest tokens,
  // or none. `first`: from token 0 on.
  __device__ void announce(const CountedIds& first) const {
    if (Traits::replays(call)) return;
    if (role.keeps && role.writes()) {
      count_all(call, first);
    } else {
      count_routes(call, role.counter(), role.counters(), role.writes(), first);
    }
    if (!role.writes()) return;
    post_counts(call.lane, state->number, counts_of(call).all(), thread(), threads());
    if (thread() != 0) return;
    keep_bad_ids(call, state->bad);
    if (!Role::kReceives) start_plan_header(call.plan.header, state->tokens);
  }

  // By the whole block: all it sends, and the flags for it.
  __device__ void send(bool waits, SlotRoute& first) const {
    if (warp() < kWorkWarps) {
      const int worker = block() * kWorkWarps + warp();
      if constexpr (Traits::kSpecialised && Traits::kReplays)
        return send_by_plan<Traits>(call, worker, waits);
      if (Traits::kSpecialised || !call.replay) return send_tokens<Traits>(call, worker, waits, first);
      send_by_any_plan(call, worker, waits);
      // Not kept across the call, which would put it in memory for all.
      first = {};
      return;
    }
    state->publisher.run(call.lane, state->number);
  }

  // The last word, by one thread, the others go on: the one that has announced, or where a barrier came after
  // that, one of a warp that has less to do. Only damaged plans make anybody wait for it, and there every
  // rank does: it comes after what others wait for, and before this rank waits for rows.
  __device__ void finish(bool after_barrier) const {
    if (role.sends && warp() == kWorkWarps - (after_barrier ? 2 : 0) && thread() % 32 == 0)
      finish_sending(call.lane, state->number, role.senders);
  }

  // Notes and the plan's entries of the tokens that this block tells of.
  __device__ void tell() const {
    if (warp() >= kWorkWarps) return;
    const int worker = role.counter() * kWorkWarps + warp();
    tell_tokens(send_state_of(call, false), counts_of(call).of_warp(warp()), state->share.token_begin(worker),
                state->share.token_end(worker));
  }

  // The plan's rows of the tokens that were told of before their rows were known.
  __device__ void finish_plan() const {
    if (Traits::replays(call) || warp() >= kWorkWarps) return;
    const int worker = role.counter() * kWorkWarps + warp();
    std::int32_t begin, end;
    if (Role::kSends) {
      // The first share of a token's row has made its entries.
      const SendPartition share = state->share;
      const int up = (1 << share.splits) - 1;
      begin = (share.unit_begin(worker) + up) >> share.splits;
      end = (share.unit_begin(worker + 1) + up) >> share.splits;
    } else {
      const auto tokens = static_cast<std::int32_t>(state->tokens);
      const int workers = static_cast<int>(gridDim.x) * kWorkWarps, each = (tokens + workers - 1) / workers;
      begin = min(worker * each, tokens);
      end = min(begin + each, tokens);
    }
    finish_routes(call.lane, BlockTables::of(call), RowOffsets::of(call), call.plan, begin, end);
  }

  __device__ void receive() const {
    if (!receive_tokens<Traits>(call, role.receiver(), role.receivers * kBlockWarps))
      clear_received(call, thread() % 32, 32);
  }

  // Rows between groups: by blocks that have sent, where there are such. Where some only send, the others,
  // all of them if rows are zeroed, which is much work.
  __device__ void pad() const {
    if (Traits::kByToken && call.lane.zero_padding)
      return pad_by(block() - role.senders, static_cast<int>(gridDim.x) - role.senders);
    if (!role.apart) return pad_by(block(), static_cast<int>(gridDim.x));
    if (!role.receives) pad_by(role.counter(), role.counters());
  }
  // By block `number` of `blocks`.
  __device__ void pad_by(int number, int blocks) const {
    write_padding(call, RowOffsets::of(call), number * kBlockWarps + warp(), blocks * kBlockWarps, call.plan);
  }

  // Of this warp's first tokens, by `share`.
  __device__ __forceinline__ SlotRoute first_routes(const SendPartition& share) const {
    const int worker = block() * kWorkWarps + warp();
    return SlotRoute::of(call, Team::of(call.lane.top_k), share.token_begin(worker), share.token_end(worker));
  }

  // Counts, then rows that need no places, then places, then rows that do, then what has come. `first`:
  // first_routes(), if asked for early.
  __device__ __forceinline__ void take_part(const CountedIds& counted, SlotRoute first) const {
    const bool waits = Role::kFused && !Traits::kByToken && state->header.facts.direct_write;
    bool placed = false;
    if (role.sends && !Traits::replays(call) && warp() < kWorkWarps) {
      if (!Traits::kByToken) first = first_routes(state->share);
      own_rows<Traits>(call, block() * kWorkWarps + warp()).start();
    }
    if (role.sends && block() == 0 && warp() == kWorkWarps)
      post_head(call.lane, state->number, state->header);
    if (role.counts()) announce(counted);
    if (role.keeps) tell();
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      if (role.sends && waits == (step == 1) && (step == 0 || placed)) send(waits, first);
      if (!Role::kReceives || (Traits::kByToken && role.sends)) return finish(false);
      __syncthreads();
      if (step == 0)
        placed = await_row_offsets<Traits>(call, role.coordinates,
                                           !role.receives || role.coordinates || !Role::kSends);
    }
    finish(!waits);
    if (!placed) {
      if (!role.coordinates) return;
      clear_received(call, thread(), threads());
      if (thread() == 0) publish_totals(call.lane, state->number, 0);
      return;
    }
    if (role.coordinates) publish_row_offsets(call);
    if (role.keeps || (role.sends && !waits) || !Role::kSends) finish_plan();
    if (role.receives) receive();
    pad();
  }

  // A plan that cannot be used: block 0 says so.
  __device__ void refuse() const {
    if (block() != 0) return;
    const LaneView& lane = call.lane;
    if (Role::kSends)
      refuse_plan(lane, Operation::dispatch, state->number, *call.plan.header, state->fault, state->tokens,
                  &state->refusal);
    if (!Role::kReceives) return;
    await_all(lane, state->number, Operation::dispatch);
    clear_received(call, thread(), threads());
    if (thread() == 0) publish_totals(lane, state->number, 0);
  }
};

// `share`: see Block::start.
template <Phase kPhase, class Traits>
__device__ __forceinline__ void run_block(const DispatchArguments& call, const SendPartition& share) {
  const Block<kPhase, Traits> block(call);
  CountedIds counted;
  SlotRoute first;
  if (!block.start(share, &counted, &first)) return;
  if (block.state->fault == PlanFault::none) {
    block.take_part(counted, first);
  } else {
    block.refuse();
  }
  if (kPhase != Phase::send) end_block(call.lane, block.state->number);
}

template <Phase kPhase, class Traits>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchArguments call) {
  run_block<kPhase, Traits>(call, call.share);
}

// Where the host knows no more than a bound of the tokens: how messages lie is chosen here, so that few do
// not pay for the most there could be.
template <bool kQuantises>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_by_count_kernel(const __grid_constant__ DispatchArguments call) {
  const std::int64_t tokens = tokens_of(call, false);
  if (tokens >= kPlaceFrom)
    return run_block<Phase::fused, SpecialisedDispatch<kQuantises, false>>(call, call.share);
  run_block<Phase::fused, SpecialisedDispatch<kQuantises, true>>(
      call, SendPartition::of(tokens, call.by_token.senders));
}

template <Phase kPhase, class Traits = GenericDispatch>
const void* kernel() {
  return reinterpret_cast<const void*>(&dispatch_kernel<kPhase, Traits>);
}

// Of both halves, from ids, and nothing is computed.
template <bool kQuantises>
std::array<const void*, 3> specialised_kernels() {
  return {kernel<Phase::fused, SpecialisedDispatch<kQuantises, false>>(),
          kernel<Phase::fused, SpecialisedDispatch<kQuantises, true>>(),
          reinterpret_cast<const void*>(&dispatch_by_count_kernel<kQuantises>)};
}

const void* kernel_of(const DispatchArguments& call, Phase phase) {
  if (phase == Phase::send) return kernel<Phase::send>();
  if (phase == Phase::receive) return kernel<Phase::receive>();
  if (call.apply_weights || call.dot_rows != nullptr) return kernel<Phase::fused>();
  const bool quantises = call.format == FormatKind::fp8_e4m3;
  if (call.replay)
    return quantises ? kernel<Phase::fused, SpecialisedResend<true>>()
                     : kernel<Phase::fused, SpecialisedResend<false>>();
  const auto [by_number, by_token, by_count] =
      quantises ? specialised_kernels<true>() : specialised_kernels<false>();
  if (call.by_token.metadata_blocks == 0) return by_number;
  return call.device_tokens == nullptr ? by_token : by_count;
}

}  // namespace

std::int64_t dispatch_shared_bytes(const LaneView& lane) {
  DispatchArguments call{};
  call.lane = lane;
  return BlockState::lay_out(&call);
}

void prepare_dispatch(const LaneView& lane) {
  const std::int64_t shared_bytes = dispatch_shared_bytes(lane);
  for (const void* kernel :
       {kernel<Phase::send>(), kernel<Phase::receive>(), kernel<Phase::fused>(),
        kernel<Phase::fused, SpecialisedResend<false>>(), kernel<Phase::fused, SpecialisedResend<true>>()}) {
    allow_shared_bytes(kernel, shared_bytes);
  }
  for (const void* kernel : specialised_kernels<false>()) allow_shared_bytes(kernel, shared_bytes);
  for (const void* kernel : specialised_kernels<true>()) allow_shared_bytes(kernel, shared_bytes);
}

void launch_dispatch(const DispatchArguments& arguments, Phase phase, const LaunchShape& shape,
                     cudaStream_t stream) {
  DispatchArguments call = arguments;
  const auto shared_bytes = static_cast<std::size_t>(BlockState::lay_out(&call));
  const bool apart = phase == Phase::fused && shape.blocks > 1;
  // Of a count in the device's memory the kernel makes its own.
  const auto [senders, metadata_blocks] = call.by_token.metadata_blocks > 0 ? call.by_token : call.by_number;
  call.share = SendPartition::of(call.tokens, apart ? senders : std::min(shape.blocks, kMaxSenders));
  if (metadata_blocks > 0) call.told = SendPartition::whole(call.tokens, metadata_blocks - 1);
  launch(kernel_of(call, phase), &call, kBlockThreads, shared_bytes, shape, stream, "launching dispatch");
}

}  // namespace ferry::cuda
