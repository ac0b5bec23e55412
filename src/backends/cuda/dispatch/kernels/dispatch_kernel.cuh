// The kernel of dispatch: the roles of its blocks, and the steps of each role in order.
#pragma once

#include <type_traits>

#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/dispatch/count_routes.cuh"
#include "backends/cuda/dispatch/dispatch_coordinator.cuh"
#include "backends/cuda/dispatch/dispatch_traits.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// The roles of this block.
template <Phase kPhase, bool kFewTokens>
struct DispatchRoles {
  static constexpr bool kSends = kPhase != Phase::receive, kReceives = kPhase != Phase::send;
  static constexpr bool kFused = kSends && kReceives;
  int senders, metadata_blocks, receivers;  // blocks of each role
  bool one_role_each;                       // no block has two roles, the coordinator's aside
  bool sends, sends_metadata, receives, coordinates;

  __device__ explicit DispatchRoles(const DispatchArguments& call) {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    one_role_each = kFused && blocks > 1;
    senders = min(blocks, kMaxSenders);
    if (one_role_each) senders = kFewTokens ? call.few_token_blocks.senders : call.many_token_blocks.senders;
    metadata_blocks = kFewTokens ? call.few_token_blocks.metadata_blocks : 0;
    receivers = one_role_each ? blocks - senders - metadata_blocks : blocks;
    sends = kSends && block < senders;
    sends_metadata = block >= senders && block < senders + metadata_blocks;
    receives = kReceives && block >= blocks - receivers;
    coordinates = kReceives && block == (one_role_each ? senders + metadata_blocks - 1 : blocks - receivers);
  }
  // Metadata blocks count where there are any, otherwise senders.
  __device__ bool counts() const { return sends_metadata || (sends && metadata_blocks == 0); }
  // This block's number among the counting blocks, and their number.
  __device__ int counting_block() const {
    return static_cast<int>(blockIdx.x) - (sends_metadata ? senders : 0);
  }
  __device__ int counting_blocks() const { return sends_metadata ? metadata_blocks : senders; }
  // The last counting block has the totals and posts them. In a fused launch it is also the coordinator, so
  // that the coordinator cannot abort the call, because of other ranks' headers, before it has added up the
  // counts of all blocks.
  __device__ bool posts_counts() const {
    return static_cast<int>(blockIdx.x) == senders + metadata_blocks - 1;
  }
  // This warp's number among the receiving warps. Consecutive messages go to different blocks.
  __device__ int receive_worker() const {
    const int block = static_cast<int>(blockIdx.x) - (static_cast<int>(gridDim.x) - receivers);
    return static_cast<int>(threadIdx.x / 32) * receivers + block;
  }
};

template <Phase kPhase, class Traits>
struct DispatchBlock {
  using Role = DispatchRoles<kPhase, Traits::kFewTokens>;

  const DispatchArguments& call;
  const Role role;
  DispatchBlockState* const state;

  __device__ explicit DispatchBlock(const DispatchArguments& of) : call(of), role(of), state(block_state()) {}

  __device__ static int block() { return static_cast<int>(blockIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }

  // [block] Fills in the block's state. Returns false if the exchange has failed. Each warp first loads
  // something else from device memory, so that all loads are in flight at once, then its first ids if their
  // places are known before N is. `partition`: the senders' tokens, or, where messages are indexed by number,
  // as if there were as many tokens as the upper bound.
  __device__ __forceinline__ bool start(const SendPartition& partition, IdPrefetch* counted,
                                        InputSlot* first) const {
    fetch_lines(call);
    RoutingTableCopy tables;
    tables.load(call.lane);
    std::uint64_t calls = 0, epoch_word = 0;
    bool failed = false;
    if (warp() == 3) epoch_word = load_epoch_word();
    if (thread() == 0) calls = call.lane.state->calls[block()];
    if (thread() == 32) failed = is_aborted(call.lane, kExchangeFailed);
    if (role.counts() && !Traits::by_plan(call)) *counted = IdPrefetch::of(call, 0, partition.tokens);
    if (role.sends && Traits::kFewTokens && warp() < kWorkWarps) *first = first_inputs(partition);
    if (thread() == 64) load_token_count();
    if (warp() == 3) fill_terms(epoch_word);
    state->publisher.reset();
    state->scratch.reset();
    if (role.counts() && !Traits::by_plan(call)) route_counts_of(call).clear(call.lane.signals);
    if (thread() == 0) state->number = calls + 1;
    if (thread() == 32) state->failed = failed;
    tables.store(call.lane, block_memory + call.shared.tables);
    __syncthreads();
    return !state->failed;
  }

  // [thread] Reads N, and fills in what depends on it: partition, header facts, the plan's fault.
  __device__ void load_token_count() const {
    const bool known = Role::kSends && call.device_tokens == nullptr;
    std::int64_t tokens = call.tokens;
    if (!known) tokens = Role::kSends ? token_count(call, block() == 0) : call.plan.header->tokens;
    const SendPartition partition = known   ? call.partition
                                    : kWide ? SendPartition::whole(tokens, role.senders)
                                            : SendPartition::of(tokens, role.senders);
    state->tokens = tokens;
    state->partition = partition;
    // The coordinator sends no metadata, because it has other work.
    if (role.sends_metadata)
      state->partition =
          known ? call.metadata_partition : SendPartition::whole(tokens, role.metadata_blocks - 1);
    state->bad = {0, ~0ull};
    state->direct_write_peers = state->direct_writers = 0;
    state->fault = Traits::by_plan(call) ? check_plan(call.lane, *call.plan.header, tokens) : PlanFault::none;
    fill_facts(call, partition, Role::kFused, Traits::kFewTokens);
  }
  // [warp] The 8 bytes of the epoch that this thread fills in, if any.
  __device__ std::uint64_t load_epoch_word() const {
    const int word = thread() % 32;
    if (word >= static_cast<int>(sizeof(Epoch) / 8)) return 0;
    return reinterpret_cast<const std::uint64_t*>(call.lane.epoch)[word];
  }
  // [warp] Fills in the epoch and the header's terms.
  __device__ void fill_terms(std::uint64_t epoch_word) const {
    const int word = thread() % 32;
    if (word < static_cast<int>(sizeof(Epoch) / 8))
      reinterpret_cast<std::uint64_t*>(&state->epoch)[word] = epoch_word;
    copy_to_shared(call.terms, &state->header.terms, word, 32);
    __syncwarp();
    if (word != 0) return;
    set_epoch(state->epoch, &state->header);
    if (Traits::by_plan(call)) {
      state->header.terms.add(static_cast<std::int64_t>(call.plan.header->call));
    } else if (Traits::kMayReplicate && call.lane.input == Input::replicated) {
      state->header.terms.set(call.hash_option, static_cast<std::int64_t>(call.lane.state->input_hash));
    }
  }

  // [block] Counts this block's routes. The last counting block, which has the fewest tokens or none, adds up
  // and posts the counts of all. `first`: the ids from token 0 on. Returns false in all threads if the
  // exchange has failed.
  [[nodiscard]] __device__ bool count_and_post(const IdPrefetch& first) const {
    if (Traits::by_plan(call)) return true;
    if (role.sends_metadata && role.posts_counts()) {
      count_all_routes<Traits>(call, first);
    } else if (!count_block_routes<Traits>(call, role.counting_block(), role.counting_blocks(),
                                           role.posts_counts(), first)) {
      return false;
    }
    if (!role.posts_counts()) return true;
    post_header_counts(call.lane, state->number, route_counts_of(call).total(), thread(), threads());
    if (thread() == 0) {
      record_bad_ids(call, state->bad);
      if (!Role::kReceives) start_plan_header(call.plan.header, state->tokens);
    }
    return true;
  }

  // [block] Sends this block's rows; the publisher warp publishes their flags.
  __device__ void send(bool has_row_offsets, InputSlot& first) const {
    if (warp() < kWorkWarps) {
      const int worker = block() * kWorkWarps + warp();
      if constexpr (Traits::kSpecialised && Traits::kByPlan)
        return send_by_plan<Traits>(call, worker, has_row_offsets);
      if (Traits::kSpecialised || !call.by_plan)
        return send_tokens<Traits>(call, worker, has_row_offsets, first);
      send_by_generic_plan<Traits>(call, worker, has_row_offsets);
      // Kept live across the call it would spill in every path.
      first = {};
      return;
    }
    state->publisher.run(call.lane, state->number);
  }

  // [thread] Ends this block's part of the stream of messages; the last block to do so publishes the
  // end-of-stream flag. The publisher warp calls it; after a barrier, a warp with less to do. Only ranks with
  // damaged plans wait for the flag, and every rank may have one: so it comes after everything that peers
  // wait for, and before this rank waits for rows.
  __device__ void finish(bool after_barrier) const {
    if (role.sends && warp() == kWorkWarps - (after_barrier ? 2 : 0) && thread() % 32 == 0)
      publish_end_of_stream(call.lane, state->number, role.senders);
  }

  // [block] Mode of few tokens: sends the slot metadata of this block's tokens.
  __device__ void send_metadata_of_block() const {
    if (warp() >= kWorkWarps) return;
    const int worker = role.counting_block() * kWorkWarps + warp();
    send_metadata<Traits>(send_context_of(call, false), route_counts_of(call).of_warp(warp()),
                          state->partition.token_begin(worker), state->partition.token_end(worker));
  }

  // [block] Completes the plan's rows of tokens that were planned before row offsets were known.
  __device__ void fill_plan_rows() const {
    if (Traits::by_plan(call) || warp() >= kWorkWarps) return;
    const int worker = role.counting_block() * kWorkWarps + warp();
    std::int32_t begin, end;
    if (Role::kSends) {
      // The warp with a row's first segment has written the token's plan entries.
      const SendPartition partition = state->partition;
      const int up = (1 << partition.log2_segments) - 1;
      begin = (partition.segment_begin(worker) + up) >> partition.log2_segments;
      end = (partition.segment_begin(worker + 1) + up) >> partition.log2_segments;
    } else {
      const auto tokens = static_cast<std::int32_t>(state->tokens);
      const int workers = static_cast<int>(gridDim.x) * kWorkWarps, each = (tokens + workers - 1) / workers;
      begin = min(worker * each, tokens);
      end = min(begin + each, tokens);
    }
    fill_route_rows(call.lane, BlockTables::of(call), RowOffsets::of(call), call.plan, begin, end);
  }

  // [warp] Receives this warp's rows. After an abort it leaves an empty result.
  __device__ void receive() const {
    if (!receive_tokens<Traits>(call, role.receive_worker(), role.receivers * kBlockWarps))
      clear_received(call, thread() % 32, 32);
  }

  // [block] Writes the padding rows, in the senders. In the mode of few tokens in the metadata blocks; if
  // rows are zeroed, which is much work, in the receivers too.
  __device__ void pad() const {
    if (Traits::kFewTokens && call.lane.zero_padding)
      return pad_share(block() - role.senders, static_cast<int>(gridDim.x) - role.senders);
    if (!role.one_role_each) return pad_share(block(), static_cast<int>(gridDim.x));
    if (!role.receives) pad_share(role.counting_block(), role.counting_blocks());
  }
  // The share of block `number` of `blocks`.
  __device__ void pad_share(int number, int blocks) const {
    write_padding(call, RowOffsets::of(call), number * kBlockWarps + warp(), blocks * kBlockWarps, call.plan);
  }

  // [warp] The inputs of this warp's first tokens.
  __device__ __forceinline__ InputSlot first_inputs(const SendPartition& partition) const {
    const int worker = block() * kWorkWarps + warp();
    return InputSlot::of(call, sending_tile<Traits>(call.lane), partition.token_begin(worker),
                         partition.token_end(worker));
  }

  // [block] The steps of a call: post the header and count; send rows that need no row offsets; wait for row
  // offsets; send rows that need them; receive; pad. `first`: first_inputs(), if start() has loaded it.
  __device__ __forceinline__ void run(const IdPrefetch& counted, InputSlot first) const {
    const bool needs_row_offsets = Role::kFused && !Traits::kFewTokens && state->header.facts.direct_write;
    bool has_row_offsets = false;
    if (role.sends && !Traits::by_plan(call) && warp() < kWorkWarps) {
      if (!Traits::kFewTokens) first = first_inputs(state->partition);
      input_rows<Traits>(call, block() * kWorkWarps + warp()).start();
    }
    if (role.sends && block() == 0 && warp() == kWorkWarps)
      post_header(call.lane, state->number, state->header);
    if (role.counts() && !count_and_post(counted)) return leave_empty();
    if (role.sends_metadata) send_metadata_of_block();
    // Sending is one piece of code, before the row offsets (step 0) or after them (step 1).
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      if (role.sends && needs_row_offsets == (step == 1) && (step == 0 || has_row_offsets))
        send(needs_row_offsets, first);
      if (!Role::kReceives || (Traits::kFewTokens && role.sends)) return finish(false);
      __syncthreads();
      if (step == 0)
        has_row_offsets = await_row_offsets<Traits>(call, role.coordinates,
                                                    !role.receives || role.coordinates || !Role::kSends);
    }
    finish(!needs_row_offsets);
    if (!has_row_offsets) return leave_empty();
    if (role.coordinates) publish_row_offsets(call);
    if (role.sends_metadata || (role.sends && !needs_row_offsets) || !Role::kSends) fill_plan_rows();
    if (role.receives) receive();
    pad();
  }

  // [block] Ends a call that was aborted before its row offsets were known: the coordinator publishes an
  // empty result.
  __device__ void leave_empty() const {
    if (!role.coordinates) return;
    clear_received(call, thread(), threads());
    if (thread() == 0) publish_totals(call.lane, state->number, 0);
  }

  // [block] Refuses a call whose plan cannot be used; only block 0 has work.
  __device__ void refuse() const {
    if (block() != 0) return;
    const LaneView& lane = call.lane;
    if (Role::kSends)
      refuse_plan(lane, Operation::dispatch, state->number, *call.plan.header, state->fault, state->tokens,
                  &state->refusal);
    if (!Role::kReceives) return;
    drain_headers(lane, state->number, Operation::dispatch);
    clear_received(call, thread(), threads());
    if (thread() == 0) publish_totals(lane, state->number, 0);
  }
};

// [block] `partition`: as in DispatchBlock::start().
template <Phase kPhase, class Traits>
__device__ __forceinline__ void run_dispatch_block(const DispatchArguments& call,
                                                   const SendPartition& partition) {
  const DispatchBlock<kPhase, Traits> block(call);
  IdPrefetch counted;
  InputSlot first;
  if (!block.start(partition, &counted, &first)) return;
  if (block.state->fault == PlanFault::none) {
    block.run(counted, first);
  } else {
    block.refuse();
  }
  if (kPhase != Phase::send) store_call_number(call.lane, block.state->number);
}

template <class Traits>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchArguments call) {
  run_dispatch_block<Phase::fused, Traits>(call, call.partition);
}

// The phases of a split call are one kernel, so that a profiler lists both under one name.
template <class Traits>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_phase_kernel(const __grid_constant__ DispatchArguments call) {
  if (call.phase == Phase::send) {
    run_dispatch_block<Phase::send, Traits>(call, call.partition);
  } else {
    run_dispatch_block<Phase::receive, Traits>(call, call.partition);
  }
}

// Chooses between the modes of many and of few tokens at run time, so that a call of few tokens does not pay
// for the upper bound that the host knows. Many = void: the host knows that they are few.
template <class Few, class Many>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dispatch_count_on_device_kernel(const __grid_constant__ DispatchArguments call) {
  const std::int64_t tokens = token_count(call, false);
  if constexpr (!std::is_void_v<Many>) {
    if (tokens >= kManyTokens) return run_dispatch_block<Phase::fused, Many>(call, call.partition);
  }
  run_dispatch_block<Phase::fused, Few>(call, SendPartition::of(tokens, call.few_token_blocks.senders));
}

template <class Traits>
const void* fused_kernel() {
  return reinterpret_cast<const void*>(&dispatch_kernel<Traits>);
}
template <class Traits>
const void* split_kernel() {
  return reinterpret_cast<const void*>(&dispatch_phase_kernel<Traits>);
}
template <class Few, class Many>
const void* counting_kernel() {
  return reinterpret_cast<const void*>(&dispatch_count_on_device_kernel<Few, Many>);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
