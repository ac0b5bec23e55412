// The relay: forwards the messages of one origin, one after the other.
#pragma once

#include "backends/cuda/two_hops/hop_send.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// [warp] `sent` counts the messages of this channel that each rank has been sent. A message stays in its slot
// until every rank that it is for has received it; `pending` holds a bit for each entry that is still to be
// forwarded.
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
        write_final(work, origin, rank, channel, k, index, payload, metadata);
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

}  // namespace ferry::cuda::inline FERRY_WIDTH
