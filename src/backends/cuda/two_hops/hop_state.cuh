// State of a block in a call in two hops, and the list of its rank's tasks.
#pragma once

#include "backends/cuda/two_hops/channel.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

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
