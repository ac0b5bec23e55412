// The relay of a combine that adds by node: it merges what the ranks of its node send to ranks of other nodes
// by token, and passes on one row for each.
//
// A channel of such a call carries the tokens whose number, modulo the number of channels, is the channel's.
// Its rows are sorted by destination rank, then by token, so the relay only looks at the next row of each
// rank.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/two_hops/hop_send.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

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
      write_bundle(work, relay, channel, k, 1u, 0, at.place, at.next, token);
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
