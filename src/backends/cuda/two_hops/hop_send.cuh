// The roles that send to final ranks and to relays, the role that receives, and the relay of a combine that
// adds by node: it merges what the ranks of its node send to ranks of other nodes by token, and passes on one
// row for each.
//
// A channel of such a combine carries the tokens whose number, modulo the number of channels, is the
// channel's. Its rows are sorted by destination rank, then by token, so the relay only looks at the next row
// of each rank.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/two_hops/hop_state.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// [warp] Records that the task waits for `peer`, and returns false, as a role that has not finished.
__device__ __forceinline__ bool waits_for(HopTaskState& at, int peer) {
  at.peer = peer;
  return false;
}

// [warp] Whether a task that has written everything announces the end of its channels now: once. It goes on
// until they are closed.
__device__ __forceinline__ bool ends_now(HopTaskState& at) {
  if (at.ended != 0) return false;
  at.ended = at.moved = 1;
  return true;
}

// [warp] Writes a message of hop 2, for this rank or for another one as its relay. `payload` and `metadata`:
// as in deliver().
template <class Transport>
__device__ __forceinline__ void write_final(const HopWork<Transport>& work, HopMessage sent,
                                            std::int32_t index, const std::byte* payload,
                                            const std::byte* metadata) {
  const HopArguments& call = work.call;
  const auto& [_, origin, reader, channel, k] = sent;
  std::byte* const to = work.channels.compose_at(1, origin, reader, channel, k);
  if (work.thread() == 0) *reinterpret_cast<std::int32_t*>(to) = index;
  if (work.routes.rows()) {
    copy_warp(to + kHopPrefix, payload, call.row_bytes);
  } else {
    if (call.payload_bytes > 0) copy_warp(to + kHopPrefix, payload, call.payload_bytes);
    copy_warp(to + kHopPrefix + call.payload_bytes, metadata, call.metadata_bytes);
  }
  work.channels.publish(1, origin, reader, channel, k, kHopPrefix + work.content_bytes());
}

// [warp] Sends every channels-th message to `rank`.
template <class Transport>
__device__ bool send_directly(const HopWork<Transport>& work, HopTaskState& at, int rank, int channel) {
  const int me = work.routes.me();
  const std::int32_t count = work.state.count[rank];
  for (;;) {
    const std::int64_t i = std::int64_t{at.next} * work.of_channels() + channel;
    if (i >= count) break;
    if (!work.channels.has_room(1, me, rank, channel, at.next)) return waits_for(at, rank);
    inject_fault(work.call.wires, KernelPoint::hop_send);
    const std::byte* const message = work.stored(rank, static_cast<std::int32_t>(i));
    // Only rows go to another node here, and their reader needs no index.
    if (work.channels.transport.is_staged(rank)) {
      work.channels.put_content({1, me, rank, channel, at.next}, kHopPrefix, message, work.content_bytes());
    } else {
      write_final(work, {1, me, rank, channel, at.next}, static_cast<std::int32_t>(i), message,
                  message + work.call.payload_bytes);
    }
    ++at.next;
    at.moved = 1;
  }
  if (ends_now(at)) {
    work.channels.end(1, me, rank, channel, at.next);
    work.count(rank, at.next, at.next * work.content_bytes());
  }
  return work.channels.is_closed(1, me, rank, channel, at.next) || waits_for(at, rank);
}

// The entries of a message of hop 1: one for each thread in `threads` (one bit each), for its `rank`.
struct HopEntries {
  std::uint32_t threads;
  int leader;  // the thread from whose message the payload is copied
  int rank;
  std::int32_t index;  // the message among this rank's messages to `rank`
  std::int32_t noted;  // HopEntry::index
};

// [warp] Writes message `k` of a channel of hop 1.
template <class Transport>
__device__ __forceinline__ void write_bundle(const HopWork<Transport>& work, int relay, int channel,
                                             std::int32_t k, HopEntries of_threads) {
  const HopArguments& call = work.call;
  const auto& [entries, leader, rank, index, noted] = of_threads;
  const int thread = work.thread(), me = work.routes.me();
  const int metadata = work.routes.rows() ? 0 : call.metadata_bytes;
  const auto payload = static_cast<int>(work.routes.rows() ? call.row_bytes : call.payload_bytes);
  std::byte* const to = work.channels.compose_at(0, me, relay, channel, k);
  const int count = __popc(static_cast<int>(entries));
  if (thread == 0) *reinterpret_cast<std::int32_t*>(to) = count;
  if ((entries >> thread & 1) != 0) {
    const int nth = __popc(static_cast<int>(entries & ((1u << thread) - 1)));
    reinterpret_cast<HopEntry*>(to + kHopPrefix)[nth] = {rank, noted};
  }
  std::byte* const content = to + call.layout.entries_bytes;
  const int from_rank = static_cast<int>(__shfl_sync(~0u, rank, leader));
  const auto from_index = static_cast<std::int32_t>(__shfl_sync(~0u, index, leader));
  if (payload > 0) copy_warp(content, work.stored(from_rank, from_index), payload);
  int nth = 0;
  for (std::uint32_t left = metadata > 0 ? entries : 0; left != 0; left &= left - 1, ++nth) {
    const int other = __ffs(static_cast<int>(left)) - 1;
    const int to_rank = static_cast<int>(__shfl_sync(~0u, rank, other));
    const auto to_index = static_cast<std::int32_t>(__shfl_sync(~0u, index, other));
    copy_warp(content + payload + nth * metadata, work.stored(to_rank, to_index) + payload, metadata);
  }
  work.channels.publish(0, me, relay, channel, k,
                        call.layout.entries_bytes + payload + std::int64_t{count} * metadata);
  // In one hop a message counts as in every other backend.
  const std::int64_t of_entry = work.routes.rows() ? 0 : metadata + (call.topology.straight ? 0 : kHopPrefix);
  work.count(relay, 1, payload + count * of_entry);
}

// [warp] send_to_relay() where `rank` is the only rank behind the relay. All messages are in the order of
// those to that rank, so a channel visits its own share only. A relay that is alone, on another node, is that
// rank itself. It knows the indices, and reads no entries (relay_messages()).
template <class Transport>
__device__ bool send_to_only_rank(const HopWork<Transport>& work, HopTaskState& at, int relay, int rank,
                                  int channel) {
  const std::int32_t count = work.state.count[rank];
  const bool bare = work.sends_bare(work.routes.me(), relay);
  for (;;) {
    const std::int64_t i = std::int64_t{at.next} * work.of_channels() + channel;
    if (i >= count) break;
    if (!work.channels.has_room(0, work.routes.me(), relay, channel, at.next)) return waits_for(at, relay);
    inject_fault(work.call.wires, KernelPoint::hop_send);
    const auto index = static_cast<std::int32_t>(i);
    if (bare) {
      work.channels.put_content({0, work.routes.me(), relay, channel, at.next},
                                work.call.layout.entries_bytes, work.stored(rank, index),
                                work.content_bytes());
      work.count(relay, 1, work.content_bytes());
    } else {
      write_bundle(work, relay, channel, at.next, {1u, 0, rank, index, index});
    }
    ++at.next;
    at.moved = 1;
  }
  if (ends_now(at)) work.channels.end(0, work.routes.me(), relay, channel, at.next);
  return work.channels.is_closed(0, work.routes.me(), relay, channel, at.next) || waits_for(at, relay);
}

// [warp] Sends every channels-th payload for the ranks behind `relay`. Messages: one payload a token, for all
// of them. Rows: one payload a rank. A thread stands for one rank behind the relay, or for several where rows
// travel in wide kernels. All channels visit all messages, in an order that follows from the messages alone,
// and each sends its share.
template <class Transport>
__device__ bool send_to_relay(const HopWork<Transport>& work, HopTaskState& at, int relay, int channel) {
  constexpr std::uint32_t kNone = ~0u;
  const HopArguments& call = work.call;
  const bool rows = work.routes.rows();
  const int thread = work.thread(), channels = work.of_channels();
  if (const int only = work.routes.only_rank_behind(relay); only >= 0)
    return send_to_only_rank(work, at, relay, only, channel);
  // A wide kernel takes the ranks of a node by their local ranks: each is a thread then.
  if (kWide && !rows && at.started == 0) {
    at.own = work.routes.member(call.topology.node[relay], thread);
    at.started = 1;
  }
  for (;;) {
    // This thread's next message in that order.
    std::uint32_t key = kNone;
    int rank = -1, nth = 0;
    std::int32_t index = 0;
    for (int n = 0; n < kRanksOfThread; ++n) {
      const int other = kWide && !rows ? (n == 0 ? at.own : -1) : thread + 32 * n;
      if (other < 0 || other >= call.wires.ranks || !work.routes.sends_by(relay, other)) continue;
      const std::int32_t next = at.cursor[n];
      if (next >= work.state.count[other]) continue;
      std::uint32_t of = 0;
      if (rows) {
        of = static_cast<std::uint32_t>(next) * kKernelRanks + static_cast<std::uint32_t>(other);
      } else {
        const std::int32_t token = call.sent_tokens[std::int64_t{other} * call.wires.max_tokens + next];
        of = min(static_cast<std::uint32_t>(token), kNone - 1);
      }
      if (of < key) key = of, rank = other, nth = n, index = next;
    }
    const std::uint32_t first = __reduce_min_sync(~0u, key);
    if (first == kNone) break;
    const std::uint32_t entries = __ballot_sync(~0u, key == first);
    if (at.next % channels == channel) {
      const std::int32_t k = at.next / channels;
      if (!work.channels.has_room(0, work.routes.me(), relay, channel, k)) return waits_for(at, relay);
      inject_fault(call.wires, KernelPoint::hop_send);
      // With a damaged plan some messages may not have been stored.
      bool stored = (entries >> thread & 1) != 0;
      if (stored && call.sets_flags && call.counts != nullptr) {
        const auto* metadata =
            reinterpret_cast<const LLPacket*>(work.stored(rank, index) + call.payload_bytes);
        stored = metadata->call >> SlotMetadata::kTokenBits == work.number();
      }
      const std::uint32_t usable = __ballot_sync(~0u, stored);
      const int leader = __ffs(static_cast<int>(usable != 0 ? usable : entries)) - 1;
      write_bundle(work, relay, channel, k, {entries, leader, rank, index, index});
      at.moved = 1;
    }
    if (key == first) ++at.cursor[nth];
    ++at.next;
  }
  const std::int32_t total = at.next > channel ? (at.next - channel + channels - 1) / channels : 0;
  if (ends_now(at)) work.channels.end(0, work.routes.me(), relay, channel, total);
  return work.channels.is_closed(0, work.routes.me(), relay, channel, total) || waits_for(at, relay);
}

// [warp] Receives what `origin` sends.
template <class Transport>
__device__ bool receive_from(const HopWork<Transport>& work, HopTaskState& at, int origin, int channel) {
  using State = typename HopChannels<Transport>::State;
  const int writer = work.routes.writer_of(origin);
  for (;;) {
    const State state = work.channels.arrived(1, origin, channel, at.next);
    if (state == State::ended) return true;
    if (state == State::late) return waits_for(at, origin);
    inject_fault(work.call.wires, KernelPoint::hop_receive);
    const std::byte* const message = work.channels.message(1, origin, channel, at.next);
    const std::byte* const content = message + kHopPrefix;
    work.deliver(origin, *reinterpret_cast<const std::int32_t*>(message), content,
                 content + work.call.payload_bytes);
    work.channels.give_back(1, origin, writer, channel, at.next);
    ++at.next;
    at.moved = 1;
  }
}

// [warp] Records where this rank's own rows lie.
template <class Transport>
__device__ bool note_own_rows(const HopWork<Transport>& work, int channel) {
  const int me = work.routes.me();
  for (std::int64_t i = 32 * channel + work.thread(); i < work.state.count[me];
       i += 32 * work.of_channels()) {
    const std::byte* const row = work.stored(me, static_cast<std::int32_t>(i));
    const std::int64_t index = work.index_of(work.label_of(row));
    if (index >= 0 && index < work.call.most_received) work.note_row(index, row);
  }
  __syncwarp();
  return true;
}

// [warp] Finds this rank's next row for `rank`, from row `i` on, whose token belongs to the channel, and
// stores its token. Returns `count` if there is none.
template <class Transport>
__device__ __forceinline__ std::int32_t next_of_channel(const HopWork<Transport>& work, int rank,
                                                        std::int32_t i, int channel, std::int32_t* token) {
  const std::int32_t count = work.state.count[rank];
  for (; i < count; i += 32) {
    const std::int32_t mine = i + work.thread();
    const std::int32_t of_mine =
        mine < count ? work.token_of_row(work.label_of(work.stored(rank, mine))) : -1;
    const std::uint32_t found = __ballot_sync(~0u, of_mine >= 0 && of_mine % work.of_channels() == channel);
    if (found == 0) continue;
    const int first = __ffs(static_cast<int>(found)) - 1;
    *token = static_cast<std::int32_t>(__shfl_sync(~0u, of_mine, first));
    return i + first;
  }
  return count;
}

// [warp] Sends the rows that are to be added at `relay`.
template <class Transport>
__device__ bool send_for_sums(const HopWork<Transport>& work, HopTaskState& at, int relay, int channel) {
  for (; at.place < work.call.wires.ranks; ++at.place, at.next = 0) {
    if (!work.routes.sends_by(relay, at.place)) continue;
    for (;;) {
      std::int32_t token = 0;
      at.next = next_of_channel(work, at.place, at.next, channel, &token);
      if (at.next >= work.state.count[at.place]) break;
      const std::int32_t k = at.sent[0];
      if (!work.channels.has_room(0, work.routes.me(), relay, channel, k)) return waits_for(at, relay);
      inject_fault(work.call.wires, KernelPoint::hop_send);
      // One entry, of thread 0: destination rank and token.
      write_bundle(work, relay, channel, k, {1u, 0, at.place, at.next, token});
      ++at.next;
      ++at.sent[0];
      at.moved = 1;
    }
  }
  if (ends_now(at)) work.channels.end(0, work.routes.me(), relay, channel, at.sent[0]);
  return work.channels.is_closed(0, work.routes.me(), relay, channel, at.sent[0]) || waits_for(at, relay);
}

// [warp] to = the sum of the rows' values, in their order from +0, rounded to kType. `rows`: a bit for each.
template <DType kType>
__device__ __forceinline__ void add_row_values(std::int32_t hidden, std::uint32_t rows,
                                               const std::byte* const* row, std::byte* to) {
  constexpr int kEach = kPerAccess<kType>;
  for (int column = static_cast<int>(threadIdx.x % 32) * kEach; column < hidden; column += 32 * kEach) {
    float sum[kEach] = {};
    const std::int64_t at = column * value_bytes(kType);
    for (std::uint32_t left = rows; left != 0; left &= left - 1) {
      float value[kEach];
      unpack<kType>(*reinterpret_cast<const uint4*>(row[__ffs(static_cast<int>(left)) - 1] + at), value);
#pragma unroll
      for (int v = 0; v < kEach; ++v) sum[v] = __fadd_rn(sum[v], value[v]);
    }
    *reinterpret_cast<uint4*>(to + at) = packed<kType>(sum);
  }
}

// [warp] Writes the row that replaces the rows of one token from several ranks, as add_values() and
// join_tails() make it (combine/packed_rows.cuh). A single row is copied. `row`: in shared memory, by rank.
__device__ inline void add_rows(const HopArguments& call, std::uint32_t rows, const std::byte* const* row,
                                std::byte* to) {
  const int first = __ffs(static_cast<int>(rows)) - 1;
  if ((rows & (rows - 1)) == 0) return copy_warp(to, row[first], call.row_bytes);
  switch (call.combine_type) {
    case DType::bf16:
      add_row_values<DType::bf16>(call.wires.hidden, rows, row, to);
      break;
    case DType::fp16:
      add_row_values<DType::fp16>(call.wires.hidden, rows, row, to);
      break;
    case DType::fp32:
      add_row_values<DType::fp32>(call.wires.hidden, rows, row, to);
      break;
  }
  const int thread = static_cast<int>(threadIdx.x % 32);
  if (thread < call.wires.top_k) {
    const std::int64_t at = call.row.tail_offset + 4 * thread;
    std::uint32_t joined = 0;
    for (std::uint32_t left = rows; left != 0; left &= left - 1)
      joined |= *reinterpret_cast<const std::uint32_t*>(row[__ffs(static_cast<int>(left)) - 1] + at);
    *reinterpret_cast<std::uint32_t*>(to + at) = joined;
  }
  if (thread == 0)
    *reinterpret_cast<std::uint64_t*>(to + call.label_offset) =
        *reinterpret_cast<const std::uint64_t*>(row[first] + call.label_offset);
}

// [warp] A thread stands for a rank of this node: in narrow kernels thread r for rank r, in wide ones for the
// one with that local rank. `cursor` is how many of its rows have been read. Rank order is the order of the
// threads.
template <class Transport>
__device__ bool relay_sums(const HopWork<Transport>& work, HopTaskState& at, int channel) {
  using State = typename HopChannels<Transport>::State;
  constexpr std::uint32_t kNone = ~0u, kNobody = kNone - 1;
  const HopArguments& call = work.call;
  const int thread = work.thread(), me = work.routes.me(), ranks = call.wires.ranks,
            my_thread = kWide ? call.topology.local[me] : me;
  if (kWide && at.next == 0) at.next = 1 + work.routes.member(call.topology.node[me], thread);
  const int rank = kWide ? at.next - 1 : thread;
  const bool is_member = rank >= 0 && rank < ranks && work.routes.here(rank);
  std::int32_t& cursor = at.cursor[0];
  for (;;) {
    // This rank's own next row.
    while (at.started == 0 && at.place < ranks) {
      if (work.routes.relays_for(at.place)) {
        at.own = next_of_channel(work, at.place, at.own, channel, &at.own_token);
        if (at.own < work.state.count[at.place]) at.started = 1;
      }
      if (at.started == 0) {
        ++at.place;
        at.own = 0;
      }
    }
    // Each rank's next row: its destination rank and its token.
    std::uint32_t to = kNone, token = kNone;
    bool late = false;
    if (thread == my_thread) {
      if (at.started != 0) to = at.place, token = at.own_token;
    } else if (is_member) {
      const State state = work.channels.look(0, rank, channel, cursor);
      late = state == State::late;
      if (state == State::ready) {
        const auto* entry =
            reinterpret_cast<const HopEntry*>(work.channels.message(0, rank, channel, cursor) + kHopPrefix);
        to = static_cast<std::uint32_t>(entry->rank);
        token = static_cast<std::uint32_t>(entry->index);
        // A row whose destination is invalid is skipped.
        if (to >= static_cast<std::uint32_t>(ranks) || !work.routes.passes_on_to(static_cast<int>(to)))
          to = kNobody;
      }
    }
    const std::uint32_t missing = __ballot_sync(~0u, late);
    if (missing != 0)
      return waits_for(at, static_cast<int>(__shfl_sync(~0u, rank, __ffs(static_cast<int>(missing)) - 1)));
    const std::uint32_t next = __reduce_min_sync(~0u, to);
    if (next == kNone) break;
    const std::uint32_t first = __reduce_min_sync(~0u, to == next ? token : kNone);
    const std::uint32_t rows = __ballot_sync(~0u, to == next && token == first);
    const int reader = static_cast<int>(next);
    if (next != kNobody) {
      const std::int32_t k = work.sent_to(at, reader);
      if (!work.channels.has_room(1, me, reader, channel, k)) return waits_for(at, reader);
      inject_fault(call.wires, KernelPoint::hop_relay);
      const std::byte* mine = nullptr;
      if (thread == my_thread) {
        if (at.started != 0) mine = work.stored(at.place, at.own);
      } else if (is_member) {
        mine = work.channels.message(0, rank, channel, cursor) + call.layout.entries_bytes;
      }
      std::byte* const out = work.channels.compose_at(1, me, reader, channel, k);
      if (thread == 0) *reinterpret_cast<std::int32_t*>(out) = static_cast<std::int32_t>(first);
      const std::byte** const row = work.rows_of_warp();
      row[thread] = mine;
      __syncwarp();
      add_rows(call, rows, row, out + kHopPrefix);
      work.channels.publish(1, me, reader, channel, k, kHopPrefix + call.row_bytes);
      work.count_sent(&at, reader);
    }
    if ((rows >> my_thread & 1) != 0) {
      at.started = 0;
      ++at.own;
    }
    for (std::uint32_t left = rows; left != 0; left &= left - 1) {
      const int of_origin = __ffs(static_cast<int>(left)) - 1;
      const auto read = static_cast<std::int32_t>(__shfl_sync(~0u, cursor, of_origin));
      const int origin = static_cast<int>(__shfl_sync(~0u, rank, of_origin));
      if (of_origin != my_thread) work.channels.give_back(0, origin, origin, channel, read);
    }
    if ((rows >> thread & 1) != 0 && thread != my_thread) ++cursor;
    at.moved = 1;
  }
  const bool ends = ends_now(at);
  bool closed = true;
  for (int reader = 0; reader < ranks; ++reader) {
    if (!work.routes.passes_on_to(reader)) continue;
    const std::int32_t sent = work.sent_to(at, reader);
    if (ends) {
      work.channels.end(1, me, reader, channel, sent);
      work.count(reader, sent, sent * call.row_bytes);
    }
    if (!work.channels.is_closed(1, me, reader, channel, sent)) closed = waits_for(at, reader);
  }
  return closed;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
