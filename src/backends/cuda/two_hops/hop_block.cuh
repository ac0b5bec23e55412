// A block of the launch between the phases: call headers first, then the tasks of its warps.
//
// Why every call ends, with any window and any number of blocks. No task blocks its warp: where it has to
// wait, the warp goes on with its other tasks. Receivers need nothing but what has arrived, so windows of hop
// 2 are always read; so relays can always write, and windows of hop 1 are always read; so senders can always
// write. Each message of a relay waits for windows of hop 2 alone, and those before it have been written.
#pragma once

#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/two_hops/hop_send.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// [warp] The relay forwards the messages of one origin, one after the other. `sent` counts the messages of
// this channel that each rank has been sent. A message stays in its slot until every rank that it is for has
// received it; `pending` holds a bit for each entry that is still to be forwarded.
template <class Transport>
__device__ bool relay_messages(const HopWork<Transport>& work, HopTaskState& at, int origin, int channel) {
  using State = typename HopChannels<Transport>::State;
  const HopArguments& call = work.call;
  const int thread = work.thread(), me = work.routes.me();
  const auto payload_bytes = work.routes.rows() ? call.row_bytes : std::int64_t{call.payload_bytes};
  const bool bare = work.sends_bare(origin, me);
  for (;;) {
    const State state = work.channels.arrived(0, origin, channel, at.next);
    if (state == State::ended) break;
    if (state == State::late) return waits_for(at, origin);
    const std::byte* const message = work.channels.message(0, origin, channel, at.next);
    // Values that an origin has written are bounded before they are used.
    HopEntry entry{-1, -1};
    if (bare) {
      if (thread == 0) entry = {me, at.next * work.of_channels() + channel};
    } else {
      const std::int32_t entries =
          ::min(::max(*reinterpret_cast<const std::int32_t*>(message), 0), call.layout.shape.node_ranks);
      if (thread < entries) entry = reinterpret_cast<const HopEntry*>(message + kHopPrefix)[thread];
    }
    const bool usable =
        entry.rank >= 0 && entry.rank < call.wires.ranks && work.routes.passes_on_to(entry.rank);
    if (at.started == 0) {
      at.pending = __ballot_sync(~0u, usable);
      at.started = 1;
      inject_fault(call.wires, KernelPoint::hop_relay);
    }
    const std::byte* const payload = message + call.layout.entries_bytes;
    for (std::uint32_t left = at.pending; left != 0; left &= left - 1) {
      const int nth = __ffs(static_cast<int>(left)) - 1;
      const int rank = static_cast<int>(__shfl_sync(~0u, entry.rank, nth));
      const auto index = static_cast<std::int32_t>(__shfl_sync(~0u, entry.index, nth));
      const std::byte* const metadata = payload + payload_bytes + nth * std::int64_t{call.metadata_bytes};
      if (rank == me) {
        work.deliver(origin, index, payload, metadata);
      } else {
        const std::int32_t k = work.sent_to(at, rank);
        if (!work.channels.has_room(1, origin, rank, channel, k)) {
          at.peer = rank;
          continue;
        }
        write_final(work, {1, origin, rank, channel, k}, index, payload, metadata);
        work.count_sent(&at, rank);
      }
      at.pending &= ~(1u << nth);
      at.moved = 1;
    }
    if (at.pending != 0) return false;
    at.started = 0;
    work.channels.give_back(0, origin, origin, channel, at.next);
    ++at.next;
  }
  const bool ends = ends_now(at);
  bool closed = true;
  for (int rank = 0; rank < call.wires.ranks; ++rank) {
    if (rank == me || !work.routes.passes_on_to(rank)) continue;
    const std::int32_t sent = work.sent_to(at, rank);
    if (ends) {
      work.channels.end(1, origin, rank, channel, sent);
      work.count(rank, sent, sent * work.content_bytes());
    }
    if (!work.channels.is_closed(1, origin, rank, channel, sent)) closed = waits_for(at, rank);
  }
  return closed;
}

// The wait that errors name for a role.
__device__ __forceinline__ WaitRole wait_role(HopRole role) {
  switch (role) {
    case HopRole::relay:
      return WaitRole::relay;
    case HopRole::receiver:
      return WaitRole::receiver;
    default:
      return WaitRole::sender;
  }
}

// [thread] report_timeout() for a role, and for data that a relay forwards: `via`, or -1.
static __device__ __noinline__ void report_hop_timeout(const LaneView& lane, const WaitTarget& awaited,
                                                       WaitRole role, int via) {
  if (claims_timeout(lane)) {
    WaitRecord* record = &lane.report->timeout;
    record->operation = awaited.operation;
    record->call = awaited.call;
    record->rank = lane.rank;
    record->peer = awaited.peer;
    record->expected = awaited.call;
    record->observed = awaited.call - 1;
    record->via = via;
    record->role = role;
    // Release at system scope: the host reads the record after this word.
    store_release_sys(&lane.report->timed_out, lane.epoch->number);
  }
  set_aborted(lane, kExchangeFailed);
}

template <class Transport>
class HopBlock {
 public:
  __device__ HopBlock(const HopArguments& call, const Transport& transport, HopState* state)
      : call_(call), lane_(call.wires), transport_(transport), state_(*state) {}

  // [block]
  __device__ void run() {
    if (thread() == 0) {
      state_.number = lane_.state->calls[0] + 1;
      state_.launch = 2 * state_.number + (call_.continues ? 1 : 0);
      state_.failed =
          is_aborted(lane_, kExchangeFailed) || (call_.continues && *call_.memory.agreed == 0) ? 1 : 0;
      state_.host_look = interval_of(global_nanoseconds());
    }
    __syncthreads();
    if (state_.failed != 0) return leave_empty();
    if (blockIdx.x == 0) send_headers();
    if (!await_headers()) return leave_empty();
    if (blockIdx.x == 0) deliver_headers();
    if (warp() == 0) compare_headers();
    __syncthreads();
    if (blockIdx.x == 0 && thread() == 0 && !call_.continues)
      *call_.memory.agreed = static_cast<std::uint32_t>(state_.agreed);
    if (state_.agreed == 0 || call_.content == HopContent::headers) return;
    read_counts();
    __syncthreads();
    if (thread() == 0) place_rows();
    if (warp() == 0) HopRoutes{call_}.list_units(&state_);
    __syncthreads();
    // Warps that have finished their tasks do not know that the call was aborted.
    if (__syncthreads_or(run_tasks() ? 0 : 1) != 0) leave_empty();
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }
  __device__ static int warps() { return threads() / 32; }
  __device__ int parity() const { return static_cast<int>(state_.launch % kHopParities); }
  template <class T = std::byte>
  __device__ T* mine(std::int64_t offset) const {
    return memory::at<T>(lane_, lane_.rank, offset);
  }
  __device__ const LLPacket* sent_header() const {
    const int peer = lane_.rank + 1 < lane_.ranks ? lane_.rank + 1 : 0;
    return reinterpret_cast<const LLPacket*>(call_.outbox + peer * call_.block_bytes);
  }
  __device__ const LLPacket* received_header(int source) const {
    return mine<const LLPacket>(call_.layout.header(parity(), source));
  }

  // [block] Sends the call headers, which the launch before has stored in the outbox.
  __device__ void send_headers() const {
    const auto bytes = static_cast<int>(call_.header_bytes);
    for (int peer = warp(); peer < lane_.ranks; peer += warps()) {
      if (peer == lane_.rank) continue;
      inject_fault(lane_, KernelPoint::header);
      const std::byte* const header = call_.outbox + peer * call_.block_bytes;
      std::byte* const place = mine(call_.layout.header(parity(), lane_.rank));
      Flag* const flag = mine<Flag>(call_.layout.header_flag(parity(), lane_.rank));
      if (transport_.is_staged(peer)) {
        std::byte* const staged = mine(call_.layout.staged_header(parity(), peer));
        copy_warp(staged, header, bytes);
        transport_.put_with_signal(lane_, peer, place, staged, bytes, {flag, state_.launch});
      } else {
        copy_warp(transport_.at(lane_, peer, place), header, bytes);
        transport_.signal(lane_, peer, flag, state_.launch);
      }
    }
  }

  // [block] Waits for the headers of all ranks. Returns false in all threads if the exchange has failed.
  __device__ bool await_headers() const {
    bool arrived = true;
    for (int peer = thread(); peer < lane_.ranks && arrived; peer += threads()) {
      if (peer == lane_.rank) continue;
      arrived = transport_.wait(lane_, mine<Flag>(call_.layout.header_flag(parity(), peer)), state_.launch,
                                nullptr, {call_.operation, state_.number, peer}) == WaitResult::ready;
    }
    return __syncthreads_and(static_cast<int>(arrived)) != 0;
  }

  // [block] Copies the headers to where the kernels of the receive phase read them. Sets the end-of-stream
  // flags too: a damaged plan may expect messages that are not sent, and nothing arrives after this launch.
  __device__ void deliver_headers() const {
    for (int source = warp(); source < lane_.ranks; source += warps()) {
      std::byte* const block = call_.inbox + source * call_.block_bytes;
      if (source != lane_.rank)
        copy_warp(block, reinterpret_cast<const std::byte*>(received_header(source)), call_.header_bytes);
      __syncwarp();
      if (thread() % 32 < kPayloads)
        store_relaxed_sys(reinterpret_cast<Flag*>(block + call_.end_of_stream) + thread() % 32,
                          state_.number);
    }
  }

  // [warp] Decides whether the call goes on, by the comparison that await_all_headers() repeats in the
  // receive phase. All ranks see the same headers, so they agree.
  __device__ void compare_headers() const {
    const LLPacket* const own = sent_header();
    const LLPacket mine = own[kHeaderTerms];
    bool agreed = mine.call == state_.number && mine.word != 0;
    std::uint32_t given = 0, absent = 0;  // optional arguments, a bit each
    for (int rank = thread() % 32; rank < lane_.ranks; rank += 32) {
      const LLPacket* const header = rank == lane_.rank ? own : received_header(rank);
      const LLPacket terms = header[kHeaderTerms], facts = header[kHeaderFacts];
      agreed = agreed && terms.word == mine.word;
      const HeaderFacts theirs = HeaderFacts::of(facts.word);
      for (int i = 0; i < kDeviceArguments; ++i) {
        given |= (theirs.argument[i] == 1 ? 1u : 0u) << i;
        absent |= (theirs.argument[i] == 0 ? 1u : 0u) << i;
      }
    }
    agreed = __all_sync(~0u, agreed);
    given = __reduce_or_sync(~0u, given);
    absent = __reduce_or_sync(~0u, absent);
    if (thread() % 32 == 0) state_.agreed = agreed && (given & absent) == 0 ? 1 : 0;
  }

  // [block] Reads how many messages or rows this rank sends to each rank. A thread for each rank.
  __device__ void read_counts() const {
    const int rank = thread();
    if (rank >= lane_.ranks) return;
    std::int64_t count;
    if (call_.counts != nullptr) {
      count = call_.counts[rank];
    } else {
      const int i = lane_.signals.first_messages + rank;
      const LLPacket packet = sent_header()[kHeaderCounts + i / 2];
      count = packet.call == state_.number ? static_cast<std::int32_t>(packet.word >> (32 * (i % 2))) : 0;
    }
    // The counts of a damaged plan may be impossible: kernels take those as 0, and send no rows beyond the
    // outbox.
    const bool rows = call_.content >= HopContent::rows;
    if (count < 0 || (!rows && count > lane_.max_tokens)) count = 0;
    state_.count[rank] = static_cast<std::int32_t>(count);
  }
  // [thread] Prefix sum over the counts: each rank's first row in the outbox.
  __device__ void place_rows() const {
    if (!HopRoutes{call_}.rows()) return;
    std::int64_t end = 0;
    for (int rank = 0; rank < lane_.ranks; ++rank) {
      state_.first[rank] = end;
      const std::int64_t room = call_.most_sent - end;
      if (state_.count[rank] > room) state_.count[rank] = static_cast<std::int32_t>(room);
      end += state_.count[rank];
    }
  }

  // [warp] Works on a task until it ends or has to wait. Returns whether it has ended.
  __device__ bool step(const HopWork<Transport>& work, const HopUnit& unit, int channel,
                       HopTaskState& at) const {
    switch (unit.role) {
      case HopRole::own:
        return note_own_rows(work, channel);
      case HopRole::direct:
        return send_directly(work, at, unit.rank, channel);
      case HopRole::sender:
        if (call_.content == HopContent::sums) return send_for_sums(work, at, unit.rank, channel);
        return send_to_relay(work, at, unit.rank, channel);
      case HopRole::relay:
        if (call_.content == HopContent::sums) return relay_sums(work, at, channel);
        return relay_messages(work, at, unit.rank, channel);
      case HopRole::receiver:
        return receive_from(work, at, unit.rank, channel);
    }
    return true;
  }

  // [block] Empties the result of a dispatch after a failure: the receive phase does nothing then, and the
  // caller's next kernels read the result.
  __device__ void leave_empty() const {
    if (call_.result_counts == nullptr) return;
    for (int group = thread(); group <= lane_.groups; group += threads()) {
      if (group < lane_.groups) call_.result_counts[group] = 0;
      call_.result_offsets[group] = 0;
    }
    if (thread() == 0)
      store_packet_relaxed_sys(reinterpret_cast<LLPacket*>(lane_.totals), {state_.number, 0});
  }

  // [warp] Works on the warp's tasks in turn. Returns false if the call was aborted.
  __device__ bool run_tasks() const {
    const HopWork<Transport> work{call_, state_, {call_, transport_, state_.launch}, HopRoutes{call_}};
    const int channels = call_.channels, tasks = state_.units * channels;
    // Tasks of a stream go to different blocks.
    const int worker = warp() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x),
              workers = warps() * static_cast<int>(gridDim.x);
    HopTaskState* const states = reinterpret_cast<HopTaskState*>(call_.memory.states) + thread() % 32;
    for (int task = worker; task < tasks; task += workers) states[std::int64_t{task} * 32] = {};
    // `at` is the state of task `held`; -1: none. Those of the warp's other tasks are in memory.
    HopTaskState at{};
    int held = -1;
    const auto hold = [&](int task) {
      if (task == held) return;
      if (held >= 0) {
        // Storing the unchanged states of tasks that wait would keep the memory busy.
        HopTaskState& stored = states[std::int64_t{held} * 32];
        if (!(stored == at)) stored = at;
      }
      if (task >= 0) at = states[std::int64_t{task} * 32];
      held = task;
    };
    for (std::uint64_t next_look = from_first_long(global_nanoseconds()) + kAbortPollIntervalNs;;) {
      bool moved = false, left = false;
      for (int task = worker; task < tasks; task += workers) {
        hold(task);
        if (at.done != 0) continue;
        at.moved = 0;
        at.done = step(work, state_.unit[task / channels], task % channels, at) ? 1 : 0;
        if (at.moved != 0) at.since = 0;
        moved = moved || at.moved != 0 || at.done != 0;
        left = left || at.done == 0;
      }
      if (!left) return true;
      if (moved) continue;
      // Waiting warps share the memory system with those that move rows.
      __nanosleep(100);
      const std::uint64_t now = from_first_long(global_nanoseconds());
      if (now < next_look) continue;
      next_look = now + kAbortPollIntervalNs;
      hold(-1);  // look_at_waits() reads and changes the states in memory
      if (!look_at_waits(work, worker, workers, tasks, now)) return false;
    }
  }
  __device__ static std::uint64_t from_first_long(std::uint64_t value) {
    return static_cast<std::uint64_t>(__shfl_sync(~0u, static_cast<unsigned long long>(value), 0));
  }

  // [thread] The poll interval that `now` lies in.
  __device__ static std::uint32_t interval_of(std::uint64_t now) {
    return static_cast<std::uint32_t>(now / kAbortPollIntervalNs);
  }
  // [warp] Whether this warp is the block's first to look in this interval.
  __device__ bool is_first_to_look(std::uint64_t now) const {
    const std::uint32_t interval = interval_of(now);
    bool first = false;
    if (thread() % 32 == 0) first = atomicExch(&state_.host_look, interval) != interval;
    return from_first(first ? 1 : 0) != 0;
  }

  // [warp] Looks at the abort words and at deadlines. A waiting warp calls it once a millisecond, and not
  // before the first has passed. Returns false if the call is aborted.
  __device__ bool look_at_waits(const HopWork<Transport>& work, int worker, int workers, int tasks,
                                std::uint64_t now) const {
    const int channels = call_.channels;
    HopTaskState* const states = reinterpret_cast<HopTaskState*>(call_.memory.states) + thread() % 32;
    bool aborted = is_aborted(lane_, state_.number);
    // Reads of the host's memory are slow: reads by all warps take longer than many a call.
    if (is_first_to_look(now) && exchange_failed(lane_)) {
      set_aborted(lane_, kExchangeFailed);
      aborted = true;
    }
    for (int task = worker; task < tasks && !aborted; task += workers) {
      HopTaskState& at = states[std::int64_t{task} * 32];
      if (at.done != 0) continue;
      if (at.since == 0) at.since = now;
      const HopUnit unit = state_.unit[task / channels];
      int via = -1;
      const int peer = awaited_by(work, unit, at, &via);
      // A relay gives up before the ranks that wait for it.
      const bool relay_is_first = via >= 0 || unit.role == HopRole::sender;
      const std::uint64_t later = relay_is_first ? relay_extra(call_.deadline) : 0;
      if (now - at.since <= call_.deadline || now - at.since - call_.deadline <= later) continue;
      if (thread() % 32 == 0)
        report_hop_timeout(lane_, {call_.operation, state_.number, peer}, wait_role(unit.role), via);
      aborted = true;
    }
    return !__any_sync(~0u, aborted);
  }
  // [thread] The rank that a task waits for. Sets `via` to the relay between them, if there is one.
  __device__ int awaited_by(const HopWork<Transport>& work, const HopUnit& unit, const HopTaskState& at,
                            int* via) const {
    if (unit.role != HopRole::receiver || work.routes.here(unit.rank)) return at.peer;
    const int writer = work.routes.writer_of(unit.rank);
    // A row that a relay has added stands for any ranks of its node, so no single peer can be named.
    if (writer != unit.rank || work.routes.sums()) *via = writer;
    return work.routes.sums() ? -1 : at.peer;
  }

  const HopArguments& call_;
  const LaneView& lane_;
  const Transport& transport_;
  HopState& state_;
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
