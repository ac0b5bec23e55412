// Channels of two hops, the state of a block in a call, and the list of its rank's tasks.
//
// Channels: how one warp passes messages to one warp of another rank, through a window of slots
// (HopLayout).
//
// Flags and credits count within a launch: their words hold its number (HopState::launch) above the count, so
// nothing is reset. When a launch begins, all windows are empty: a rank writes to them only after it has the
// headers of all ranks, and a rank posts its header after the launch before, which has read everything.
//
//   message   stored; flag (release, system scope) in signal() | acquire in look(); read
//   slot      read; credit (release) in signal()               | acquire in was_read(); written again
//
// Signals to a rank of another node may arrive in any order. No two of them are ever on their way to one
// word: each slot has a flag and a credit of its own, the slot's next flag is set after the credit has come,
// and its next credit given after that flag has. A channel's end is sent once a launch, and its reader waits
// for it. A launch ends when the messages that it has put have been read (is_closed()). So nothing of a
// launch arrives in a later one, and the outbox and send staging are free.
#pragma once

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/wait.cuh"
#include "backends/cuda/transport/transport.cuh"
#include "backends/cuda/two_hops/hop_call.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kHopCountBits = 26;
inline constexpr std::uint64_t kHopCountMask = (std::uint64_t{1} << kHopCountBits) - 1;
static_assert(std::int64_t{kMaxHopNodeRanks} * SlotMetadata::kMostTokens <
              (std::int64_t{1} << kHopCountBits));

__device__ __forceinline__ std::uint64_t hop_tag(std::uint64_t number, std::int64_t count) {
  return number << kHopCountBits | static_cast<std::uint64_t>(count);
}

// [warp] Broadcasts thread 0's value. Also a barrier: all threads may then read what thread 0 has acquired.
__device__ __forceinline__ std::int32_t from_first(std::int32_t value) {
  return static_cast<std::int32_t>(__shfl_sync(~0u, value, 0));
}

// [warp] Copies whole 16-byte units. Inlined wherever it is used, it doubles the kernels, which then need
// more stack than the 1,024 bytes that a thread has by default.
static __device__ __noinline__ void copy_warp(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const int end = static_cast<int>(bytes);
  copy_granules<8>(from, {0, end}, [&](const Granules<8>& granules, int at) { granules.store(to, at, end); });
}

// Message `k` of the channel `channel` that carries the rows of `origin` to `reader`.
struct HopMessage {
  int hop, origin, reader, channel;
  std::int32_t k;
};

// One rank's view of the channels of a launch.
template <class Transport>
struct HopChannels {
  const HopArguments& call;
  const Transport& transport;
  const std::uint64_t number;  // of the launch

  __device__ __forceinline__ const LaneView& lane() const { return call.wires; }
  __device__ __forceinline__ int me() const { return lane().rank; }
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int slots() const { return call.layout.shape.slots; }
  template <class T = std::byte>
  __device__ __forceinline__ T* mine(std::int64_t offset) const {
    return memory::at<T>(lane(), me(), offset);
  }

  // --- writing -------------------------------------------------------------------------------------------

  // [thread] Whether the reader has read message `k` of the channel.
  __device__ __forceinline__ bool was_read(int hop, int origin, int reader, int channel,
                                           std::int32_t k) const {
    const Flag* credit = mine<Flag>(call.layout.credit(hop, origin, reader, channel, k % slots()));
    const std::uint64_t tag = hop_tag(number, k + 1);
    // Acquire: the reader has read the slot before. The transport's own acquire() is for reading what the
    // other rank has sent, and nothing of that comes with a credit.
    return load_relaxed_sys(credit) >= tag && load_acquire_sys(credit) >= tag;
  }
  // [warp] Whether message `k` of the channel may be written.
  __device__ __forceinline__ bool has_room(int hop, int origin, int reader, int channel,
                                           std::int32_t k) const {
    if (k < slots()) return true;
    bool room = false;
    if (thread() == 0) room = was_read(hop, origin, reader, channel, k - slots());
    return from_first(room ? 1 : 0) != 0;
  }

  // Where message `k` of a channel is composed: in the reader's window, or in the staging that it is put
  // from.
  __device__ __forceinline__ std::byte* compose_at(int hop, int origin, int reader, int channel,
                                                   std::int32_t k) const {
    const int slot = k % slots();
    if (transport.is_staged(reader))
      return mine(call.layout.staged(call.topology.local[origin], reader, channel, slot));
    return transport.at(lane(), reader, mine(call.layout.slot(hop, origin, channel, slot)));
  }
  // [warp] Puts `content`, in the outbox or in send staging, to `offset` in the slot of message `k`, and
  // announces the message. Nothing else of the slot is written. For a staged reader.
  __device__ __forceinline__ void put_content(HopMessage sent, std::int64_t offset, const std::byte* content,
                                              std::int64_t bytes) const {
    const auto& [hop, origin, reader, channel, k] = sent;
    const int slot = k % slots();
    transport.put_with_signal(
        lane(), reader, mine(call.layout.slot(hop, origin, channel, slot)) + offset, content,
        static_cast<int>(bytes),
        {mine<Flag>(call.layout.flag(hop, origin, channel, slot)), hop_tag(number, k + 1)});
  }
  // [warp] Announces message `k`, which has been composed, to its reader. `bytes`: size of the whole message.
  __device__ __forceinline__ void publish(int hop, int origin, int reader, int channel, std::int32_t k,
                                          std::int64_t bytes) const {
    const int slot = k % slots();
    if (transport.is_staged(reader)) {
      put_content({hop, origin, reader, channel, k}, 0,
                  mine(call.layout.staged(call.topology.local[origin], reader, channel, slot)), bytes);
    } else {
      Flag* const flag = mine<Flag>(call.layout.flag(hop, origin, channel, slot));
      const std::uint64_t tag = hop_tag(number, k + 1);
      transport.signal(lane(), reader, flag, tag);
    }
  }
  // [warp] Announces that the channel has `total` messages in this launch.
  __device__ __forceinline__ void end(int hop, int origin, int reader, int channel,
                                      std::int32_t total) const {
    transport.signal(lane(), reader, mine<Flag>(call.layout.end(hop, origin, channel)),
                     hop_tag(number, total));
  }
  // [warp] Whether everything that was put into the channel has been read, so that the launch may end. For a
  // channel that has ended. Stores to mapped memory need no such wait: they arrive before a launch ends.
  __device__ __forceinline__ bool is_closed(int hop, int origin, int reader, int channel,
                                            std::int32_t total) const {
    if (!transport.is_staged(reader)) return true;
    bool read = true;
    for (std::int32_t k = max(total - slots(), 0) + thread(); k < total; k += 32)
      read = read && was_read(hop, origin, reader, channel, k);
    return __all_sync(~0u, read) != 0;
  }

  // --- reading -------------------------------------------------------------------------------------------

  enum class State { ready, late, ended };

  // [thread] Whether message `k` of the channel has arrived; the warp may read it after a barrier.
  __device__ __forceinline__ State look(int hop, int origin, int channel, std::int32_t k) const {
    const Flag* flag = mine<Flag>(call.layout.flag(hop, origin, channel, k % slots()));
    const std::uint64_t tag = hop_tag(number, k + 1);
    if (load_relaxed_sys(flag) >= tag && load_acquire_sys(flag) >= tag) {
      transport.acquire(flag, tag);
      return State::ready;
    }
    const std::uint64_t end = load_relaxed_sys(mine<Flag>(call.layout.end(hop, origin, channel)));
    const bool ended = end >> kHopCountBits == number && static_cast<std::int64_t>(end & kHopCountMask) <= k;
    return ended ? State::ended : State::late;
  }
  // [warp] look(), with the same result in all threads.
  __device__ __forceinline__ State arrived(int hop, int origin, int channel, std::int32_t k) const {
    int state = 0;
    if (thread() == 0) state = static_cast<int>(look(hop, origin, channel, k));
    return static_cast<State>(from_first(state));
  }
  __device__ __forceinline__ const std::byte* message(int hop, int origin, int channel,
                                                      std::int32_t k) const {
    return mine(call.layout.slot(hop, origin, channel, k % slots()));
  }
  // [warp] Tells `writer` that message `k` of its channel has been read: the credit for its slot.
  __device__ __forceinline__ void give_back(int hop, int origin, int writer, int channel,
                                            std::int32_t k) const {
    transport.signal(lane(), writer, mine<Flag>(call.layout.credit(hop, origin, me(), channel, k % slots())),
                     hop_tag(number, k + 1));
  }
};

// Roles of a warp, each for the streams with one rank.
enum class HopRole : std::uint8_t {
  own,      // records where this rank's own rows lie
  direct,   // sends to a final rank
  sender,   // sends to a relay
  relay,    // forwards what an origin sends; where it adds rows: what all origins send
  receiver  // receives what an origin sends
};

struct HopUnit {
  HopRole role;
  std::uint8_t rank;
};

// A thread stands for ranks thread, thread + 32, ... where a task counts by rank.
inline constexpr int kRanksOfThread = kKernelRanks / 32;

// Where a task stands, by thread of its warp; kept while the warp works on another task. Starts as zeros.
struct HopTaskState {
  std::int32_t next;                    // item, or message of the channel
  std::int32_t cursor[kRanksOfThread];  // of a rank: its next message, or how many its channel has read
  std::int32_t sent[kRanksOfThread];    // to a rank
  std::int32_t place;                   // in the list of ranks
  std::uint32_t pending, started;
  std::int32_t peer;    // rank that it waits for; -1: none
  std::uint32_t moved;  // has moved data in this step
  std::uint32_t done;
  std::int32_t own, own_token;  // of a relay that adds: this rank's next row
  std::uint32_t ended;          // has announced the end of its channels
  std::uint64_t since;          // when it began to wait; 0: it is not waiting
  std::uint64_t spare;

  bool operator==(const HopTaskState&) const = default;
};
static_assert(sizeof(HopTaskState) == hop_task_bytes(kWide));

// In shared memory.
struct HopState {
  std::uint64_t number;  // of the call
  std::uint64_t launch;  // 2 x number, and 1 if it continues the call
  std::int32_t failed, agreed;
  std::uint32_t host_look;  // poll interval in which a warp of the block has last read the host's abort word
  std::int32_t count[kKernelRanks];  // messages or rows of this rank to each rank
  std::int64_t first[kKernelRanks];  // row among those in the outbox
  std::int32_t units;
  HopUnit unit[4 * kKernelRanks + 2];
  // Of a warp that adds: one row of each rank of its node.
  const std::byte* row[kManyHopThreads / 32][kMaxHopNodeRanks];
};

// Which rank forwards what, and to whom, in a call. All functions: [thread].
struct HopRoutes {
  const HopArguments& call;

  __device__ int me() const { return call.wires.rank; }
  __device__ bool rows() const { return call.content >= HopContent::rows; }
  __device__ bool sums() const { return call.content == HopContent::sums; }
  __device__ bool here(int rank) const {
    return call.topology.node[rank] == call.topology.node[call.wires.rank];
  }
  // Whether this rank is the relay between `rank` and its own node.
  __device__ bool relays_for(int rank) const { return !here(rank) && call.topology.relay_here[rank] == me(); }

  // Whether this rank's messages to `rank` go there without a relay and are not added on the way.
  __device__ bool sends_directly(int rank) const {
    if (rank == me()) return false;
    return here(rank) || (rows() && !sums() && relays_for(rank));
  }
  // Whether this rank's messages to `rank` go to the relay `relay`, which is another rank.
  __device__ bool sends_by(int relay, int rank) const {
    if (here(rank)) return false;
    return relay != me() &&
           (rows() ? call.topology.relay_here[rank] : call.topology.relay_there[rank]) == relay;
  }
  // Whether this rank may forward another rank's messages to `rank`.
  __device__ bool passes_on_to(int rank) const {
    if (rows()) return relays_for(rank);
    return call.topology.straight ? rank == me() : here(rank);
  }
  __device__ bool relays_of(int origin) const {
    if (rows()) return !call.topology.straight && here(origin) && origin != me();
    return relays_for(origin);
  }
  // The rank that writes the stream of `origin` to this rank; -1: none.
  __device__ int writer_of(int origin) const {
    if (origin == me()) return -1;
    if (here(origin)) return origin;
    if (!rows()) return call.topology.relay_here[origin] == me() ? -1 : call.topology.relay_here[origin];
    const int relay = call.topology.relay_there[origin];
    return sums() && relay != origin ? -1 : relay;
  }

  // [thread] The rank of a node that has this local rank; -1: none.
  __device__ int member(int node, int local_rank) const {
    for (int rank = 0; rank < call.wires.ranks; ++rank) {
      if (call.topology.node[rank] == node && call.topology.local[rank] == local_rank) return rank;
    }
    return -1;
  }

  // [warp] The only rank that this one sends to by `relay`; -1: there are several.
  __device__ int only_rank_behind(int relay) const {
    int found = -1, ranks = 0;
    for (int rank = thread(); rank < call.wires.ranks; rank += 32) {
      if (!sends_by(relay, rank)) continue;
      found = rank;
      ++ranks;
    }
    if (__reduce_add_sync(~0u, ranks) != 1) return -1;
    return __reduce_max_sync(~0u, found);
  }

  // [warp] Lists the tasks of this rank. Thread r lists those with ranks r, r + 32, ...
  __device__ void list_units(HopState* state) const {
    const int ranks = call.wires.ranks;
    bool relays_rows = false;
    for (int rank = thread(); rank < ranks; rank += 32) relays_rows = relays_rows || relays_for(rank);
    relays_rows = __any_sync(~0u, rows() && relays_rows);
    int units = 0;
    const auto add = [&](HopRole role, auto&& has) {
      for (int first = 0; first < ranks; first += 32) {
        const int rank = first + thread();
        const bool adds = rank < ranks && has(rank);
        const std::uint32_t all = __ballot_sync(~0u, adds);
        const int before = __popc(static_cast<int>(all & ((1u << thread()) - 1)));
        if (adds) state->unit[units + before] = {role, static_cast<std::uint8_t>(rank)};
        units += __popc(static_cast<int>(all));
      }
    };
    // Whether `rank` is the relay for some of this rank's messages.
    const auto is_relay = [&](int rank) {
      for (int last = 0; last < ranks; ++last) {
        if (sends_by(rank, last)) return true;
      }
      return false;
    };
    add(HopRole::own, [&](int rank) { return rows() && call.packs_own_rows && rank == me(); });
    add(HopRole::direct, [&](int rank) { return sends_directly(rank); });
    add(HopRole::sender, is_relay);
    add(HopRole::relay, [&](int rank) {
      if (sums()) return relays_rows && rank == me();
      return (!rows() || relays_rows) && relays_of(rank);
    });
    add(HopRole::receiver, [&](int rank) { return writer_of(rank) >= 0; });
    if (thread() == 0) state->units = units;
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x % 32); }
};
static_assert(kMaxDeviceRanks <= kHopThreads);  // a thread of a block for each rank

// What all roles share. A role is a function that returns whether its task has finished; if not, the task
// waits.
template <class Transport>
struct HopWork {
  const HopArguments& call;
  HopState& state;
  HopChannels<Transport> channels;
  HopRoutes routes;

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ std::uint64_t number() const { return state.number; }
  __device__ __forceinline__ int of_channels() const { return call.channels; }
  __device__ __forceinline__ std::int64_t content_bytes() const {
    return routes.rows() ? call.row_bytes : std::int64_t{call.payload_bytes} + call.metadata_bytes;
  }

  __device__ __forceinline__ const std::byte** rows_of_warp() const { return state.row[threadIdx.x / 32]; }

  // Where a task keeps a count of `rank`: in thread `rank % 32`.
  __device__ __forceinline__ static int nth(int rank) { return kWide ? rank / 32 : 0; }
  // [warp] The messages or rows that `rank` has been sent. `rank` is the same in all threads.
  __device__ __forceinline__ static std::int32_t sent_to(const HopTaskState& at, int rank) {
    return static_cast<std::int32_t>(__shfl_sync(~0u, at.sent[nth(rank)], rank % 32));
  }
  __device__ __forceinline__ static void count_sent(HopTaskState* at, int rank) {
    if (thread() == rank % 32) ++at->sent[nth(rank)];
  }

  // Whether messages from `origin` to the relay `relay` have no entries, because they are put from the
  // outbox. This rank must be `origin` or `relay`.
  __device__ __forceinline__ bool sends_bare(int origin, int relay) const {
    return !routes.rows() && routes.call.topology.alone.has(relay) &&
           channels.transport.is_staged(origin == routes.me() ? relay : origin);
  }

  // This rank's message or row `i` for `rank`, in its outbox.
  __device__ __forceinline__ const std::byte* stored(int rank, std::int32_t i) const {
    if (routes.rows()) return call.row_outbox + (state.first[rank] + i) * call.row_bytes;
    return call.outbox + rank * call.block_bytes + call.header_bytes + i * content_bytes();
  }
  __device__ __forceinline__ std::uint64_t label_of(const std::byte* row) const {
    return *reinterpret_cast<const std::uint64_t*>(row + call.label_offset);
  }
  // Index in staging of the row with this label; -1: not a row of this call, which a damaged plan causes.
  __device__ __forceinline__ std::int64_t index_of(std::uint64_t label) const {
    const auto index = static_cast<std::int32_t>(label);
    const bool valid = index >= 0 && (label ^ (number() << 32)) == static_cast<std::uint32_t>(index);
    return valid ? index : -1;
  }
  __device__ __forceinline__ std::int32_t token_of_row(std::uint64_t label) const {
    const std::int64_t index = index_of(label);
    return index < 0 ? -1 : static_cast<std::int32_t>(index / call.wires.most_ranks);
  }

  // [warp] Adds to the wire counts.
  __device__ __forceinline__ void count(int peer, std::int64_t messages, std::int64_t bytes) const {
    if (thread() != 0 || messages == 0 || call.memory.counts == nullptr) return;
    HopCounts* to = call.memory.counts + (routes.rows() ? 2 : 0) + (routes.here(peer) ? 0 : 1);
    atomicAdd(&to->messages, static_cast<unsigned long long>(messages));
    atomicAdd(&to->bytes, static_cast<unsigned long long>(bytes));
  }

  // [warp] Copies a message of `origin` to where the kernels of the receive phase read it.
  __device__ __forceinline__ void deliver(int origin, std::int32_t index, const std::byte* payload,
                                          const std::byte* metadata) const {
    if (routes.rows()) return deliver_row(payload);
    if (index < 0 || index >= call.wires.max_tokens) return;
    std::byte* const block = call.inbox + origin * call.block_bytes;
    std::byte* const to = block + call.header_bytes + index * content_bytes();
    if (call.payload_bytes > 0) copy_warp(to, payload, call.payload_bytes);
    copy_warp(to + call.payload_bytes, metadata, call.metadata_bytes);
    const std::uint64_t noted = reinterpret_cast<const LLPacket*>(metadata)->call;
    if (!call.sets_flags || noted >> SlotMetadata::kTokenBits != number()) return;
    Flag* flags = reinterpret_cast<Flag*>(block + call.flags) + std::int64_t{index} * kQuarters;
    if (thread() < kQuarters) store_relaxed_sys(flags + thread(), number());
  }
  // [warp]
  __device__ __forceinline__ void deliver_row(const std::byte* row) const {
    const std::int64_t index = index_of(label_of(row));
    if (index < 0 || index >= call.most_received) return;
    std::byte* const to = call.row_inbox + index * call.row_bytes;
    copy_warp(to, row, call.row_bytes);
    if (thread() == 0) note_row(index, to);
  }
  // [thread] As kFindRowsKernel does.
  __device__ __forceinline__ void note_row(std::int64_t index, const std::byte* row) const {
    call.arrived[index] = {number(), reinterpret_cast<std::uint64_t>(row)};
    Flag* flags = reinterpret_cast<Flag*>(call.inbox + call.row_flags) + index * kQuarters;
    for (int quarter = 0; quarter < kQuarters; ++quarter) store_relaxed_sys(flags + quarter, number());
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
