// The launch between the phases of a call in two hops: it moves what the send phase has stored in this rank's
// outbox into the inboxes of other ranks, through windows and by relays.
//
// Outbox, inbox and packed rows are those of a lane whose messages an engine carries
// (host/memory_layout.hpp): the kernels of the phases are the same.
#pragma once

#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstdint>

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "base/host_device.hpp"
#include "base/integers.hpp"
#include "ferry/topology.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cuda {

// Where the windows of two hops lie in a rank's symmetric memory. Their size does not depend on the number of
// tokens.
//
// What one rank sends another in a hop is a *stream*, cut into *channels*, each with one writing and one
// reading warp. A channel passes through a window of slots in the reader's memory:
//
//   hop 1   to a relay       slot   | entries, rank and index of each | payload | metadata of each entry |
//   hop 2   to its final rank       | index | content |
//
// Messages that are put without being composed leave out the entries, or the index (put_content()).
//
// A stream is named by its origin, the rank whose rows it carries. Streams of hop 1 are written by their
// origin, those of hop 2 by their origin or by a relay.

// An entry of a slot of hop 1: a rank that gets the payload, and the index of this message among the origin's
// messages to that rank; of a row that the relay adds, its token.
struct HopEntry {
  std::int32_t rank, index;
};

inline constexpr int kHops = 2;
inline constexpr int kHopParities = 4;          // buffers of call headers: launch number modulo this
inline constexpr std::int64_t kHopPrefix = 16;  // bytes at the beginning of a slot: a count, or an index

// The numbers that determine the layout; the same on every rank.
struct HopShape {
  std::int32_t ranks = 0;
  std::int32_t node_ranks = 0;     // of the largest node
  std::int32_t channels = 0;       // of a stream
  std::int32_t slots = 0;          // of a channel
  std::int64_t header_bytes = 0;   // of a call header
  std::int64_t payload_bytes = 0;  // largest payload of a message
  std::int64_t metadata_bytes = 0;
  std::int64_t row_bytes = 0;  // of a row that combine packs
  bool composes = true;        // some messages to other nodes are composed in send staging
};

// Offsets in a lane's section. Bytes.
struct HopLayout {
  HopShape shape;
  std::int64_t entries_bytes;  // of a slot of hop 1: prefix and entries
  std::int64_t slot_bytes[kHops];
  std::int64_t header_flags;    // [parities][R sources] flags: the header of the launch has arrived
  std::int64_t flags[kHops];    // [R origins][channels][slots] the message in the slot has arrived
  std::int64_t ends[kHops];     // [R origins][channels] messages of the channel in the launch
  std::int64_t credits[kHops];  // [R origins][R readers][channels][slots] read, in the writer's memory
  std::int64_t signals_end;
  std::int64_t headers;         // [parities][R sources]
  std::int64_t windows[kHops];  // [R origins][channels][slots]
  // For peers that are not mapped: what this rank puts to them from.
  std::int64_t staged_headers;  // [parities][R peers]
  std::int64_t staging;         // [node ranks][R peers][channels][slots]
  std::int64_t staging_slot;
  std::int64_t bytes;

  static constexpr HopLayout of(const HopShape& shape) {
    constexpr auto lines = [](std::int64_t size) { return (size + 127) / 128 * 128; };
    const std::int64_t ranks = shape.ranks, channels = shape.channels,
                       slots = std::int64_t{shape.channels} * shape.slots;
    HopLayout layout{};
    layout.shape = shape;
    layout.entries_bytes = kHopPrefix + (std::int64_t{sizeof(HopEntry)} * shape.node_ranks + 15) / 16 * 16;
    const auto larger = [](std::int64_t a, std::int64_t b) { return a > b ? a : b; };
    layout.slot_bytes[0] =
        lines(layout.entries_bytes +
              larger(shape.payload_bytes + shape.node_ranks * shape.metadata_bytes, shape.row_bytes));
    layout.slot_bytes[1] =
        lines(kHopPrefix + larger(shape.payload_bytes + shape.metadata_bytes, shape.row_bytes));
    layout.staging_slot = larger(layout.slot_bytes[0], layout.slot_bytes[1]);
    std::int64_t end = 0;
    const auto take = [&](std::int64_t bytes) {
      const std::int64_t begin = end;
      end = lines(begin + bytes);
      return begin;
    };
    layout.header_flags = take(8 * kHopParities * ranks);
    for (int hop = 0; hop < kHops; ++hop) {
      layout.flags[hop] = take(8 * ranks * slots);
      layout.ends[hop] = take(8 * ranks * channels);
      layout.credits[hop] = take(8 * ranks * ranks * slots);
    }
    layout.headers = take(kHopParities * ranks * shape.header_bytes);
    layout.signals_end = end;
    for (int hop = 0; hop < kHops; ++hop) layout.windows[hop] = take(ranks * slots * layout.slot_bytes[hop]);
    layout.staged_headers = take(kHopParities * ranks * shape.header_bytes);
    layout.staging = take(shape.composes ? shape.node_ranks * ranks * slots * layout.staging_slot : 0);
    layout.bytes = (end + 4095) / 4096 * 4096;
    return layout;
  }

  FERRY_HD constexpr std::int64_t channel(int origin, int channel) const {
    return std::int64_t{origin} * shape.channels + channel;
  }
  FERRY_HD constexpr std::int64_t header_flag(int parity, int source) const {
    return header_flags + 8 * (std::int64_t{parity} * shape.ranks + source);
  }
  FERRY_HD constexpr std::int64_t header(int parity, int source) const {
    return headers + (std::int64_t{parity} * shape.ranks + source) * shape.header_bytes;
  }
  FERRY_HD constexpr std::int64_t staged_header(int parity, int peer) const {
    return staged_headers + (std::int64_t{parity} * shape.ranks + peer) * shape.header_bytes;
  }
  FERRY_HD constexpr std::int64_t flag(int hop, int origin, int of_channel, int slot) const {
    return flags[hop] + 8 * (channel(origin, of_channel) * shape.slots + slot);
  }
  FERRY_HD constexpr std::int64_t end(int hop, int origin, int of_channel) const {
    return ends[hop] + 8 * channel(origin, of_channel);
  }
  FERRY_HD constexpr std::int64_t credit(int hop, int origin, int reader, int of_channel, int slot) const {
    return credits[hop] +
           8 * (((std::int64_t{origin} * shape.ranks + reader) * shape.channels + of_channel) * shape.slots +
                slot);
  }
  FERRY_HD constexpr std::int64_t slot(int hop, int origin, int of_channel, int nth) const {
    return windows[hop] + (channel(origin, of_channel) * shape.slots + nth) * slot_bytes[hop];
  }
  // `origin`: its local rank.
  FERRY_HD constexpr std::int64_t staged(int origin, int peer, int of_channel, int nth) const {
    return staging +
           (((std::int64_t{origin} * shape.ranks + peer) * shape.channels + of_channel) * shape.slots + nth) *
               staging_slot;
  }
};

// Threads of a block. Where the peer's memory is mapped, a put keeps its warp until it has copied all bytes.
// So more warps move many rows faster. Few rows take longer, because each thread has half the registers.
inline constexpr int kHopThreads = 512, kManyHopThreads = 1024;

// What a call moves.
enum class HopContent : std::int32_t {
  headers,   // call headers alone
  messages,  // to the experts: payload and slot metadata
  rows,      // packed rows, to the tokens' source ranks
  sums       // packed rows, of which a relay adds those of a token
};

// Ranks of a node. In the kernels a rank of a relay's node is a thread of a warp, or a bit of a word.
inline constexpr int kMaxHopNodeRanks = 32;

// The nodes as one rank sees them. [R]
struct HopTopology {
  std::uint8_t node[kMaxDeviceRanks], local[kMaxDeviceRanks];
  std::uint8_t relay_there[kMaxDeviceRanks];  // on the rank's node: between it and this rank
  std::uint8_t relay_here[kMaxDeviceRanks];   // on this rank's node: between it and the rank

  // Ranks that are the only ones behind their relay: each is the only rank of its node.
  RankBits<kMaxDeviceRanks> alone;

  // In one hop each rank of another node is its own relay, and alone behind it: messages go straight to it.
  bool straight;

  static HopTopology of(const Topology& topology, int rank, Hops hops = Hops::two);
};

inline HopTopology HopTopology::of(const Topology& topology, int rank, Hops hops) {
  HopTopology of{};
  of.straight = hops == Hops::one;
  const int mine = topology.node_of(rank);
  for (int other = 0; other < topology.ranks(); ++other) {
    const int node = topology.node_of(other);
    const bool passes_no_relay = of.straight && node != mine;
    const auto i = static_cast<std::size_t>(other);
    if (of.straight || topology.ranks_of(node).size() == 1) of.alone.add(other);
    of.node[i] = static_cast<std::uint8_t>(node);
    of.local[i] = static_cast<std::uint8_t>(topology.local_rank_of(other));
    of.relay_there[i] = static_cast<std::uint8_t>(passes_no_relay ? other : topology.relay_of(rank, node));
    of.relay_here[i] = static_cast<std::uint8_t>(passes_no_relay ? rank : topology.relay_of(other, mine));
  }
  return of;
}

// What hops have moved, as WireCounts counts it.
struct HopCounts {
  unsigned long long bytes, messages;
};

// Bytes of a HopTaskState (hop_state.cuh). A thread of a narrow kernel keeps counts of one rank, a thread of
// a wide kernel of eight.
constexpr std::int64_t hop_task_bytes(bool wide) {
  return wide ? 120 : 64;
}

// Device memory of a lane, beside the windows.
struct HopMemory {
  std::byte* states;      // [tasks][32] HopTaskState
  HopCounts* counts;      // [dispatch, combine][within a node, between nodes]; null: not counted
  std::uint32_t* agreed;  // 1: the ranks have agreed on the call in its first launch
};

// Nanoseconds by which a wait for what a rank forwards, or for its room, exceeds the deadline: the relay
// gives up first.
FERRY_HD constexpr std::uint64_t relay_extra(std::uint64_t deadline) {
  constexpr std::uint64_t kMost = 500'000'000;
  return deadline / 4 < kMost ? deadline / 4 : kMost;
}
// Deadline of the wait for the call headers. A rank that has not sent its header may still wait in the call
// before, up to relay_extra() beyond the deadline. It knows which rank is missing, so it gives up first.
constexpr std::uint64_t header_deadline(std::uint64_t deadline) {
  constexpr std::uint64_t kMost = 100'000'000, kNever = ~std::uint64_t{0};
  const std::uint64_t extra = relay_extra(deadline) + (deadline / 10 < kMost ? deadline / 10 : kMost);
  return deadline > kNever - extra ? kNever : deadline + extra;
}

struct HopArguments {
  LaneView wires;          // its symmetric memory holds the windows; `deadline`: header_deadline()
  std::uint64_t deadline;  // nanoseconds that a task waits for its peer
  HopLayout layout;
  HopTopology topology;
  HopMemory memory;
  std::int32_t threads;   // of a block: kHopThreads, or kManyHopThreads
  std::int32_t channels;  // of a stream: the first ones of the layout's; the same on every rank
  Operation operation;    // for records of waits
  HopContent content;
  // The second launch of a call, which moves the rows of a combine after its weights. It does nothing if the
  // ranks have not agreed in the first.
  bool continues;

  // The lane's memory (EngineLayout).
  std::byte *inbox, *outbox;
  std::int64_t block_bytes, header_bytes, flags, end_of_stream;  // of a block
  // Messages.
  std::int32_t payload_bytes, metadata_bytes;
  bool sets_flags;                  // of messages with metadata of this call
  const std::int32_t* sent_tokens;  // [R, T] of the plan
  // [R] messages to each rank; null: read from the call headers.
  const std::int32_t* counts;
  // Counts and row offsets in the caller's device memory; null except in a dispatch.
  std::int32_t *result_counts, *result_offsets;
  // Rows.
  std::byte *row_outbox, *row_inbox;
  std::int64_t row_bytes, label_offset, most_sent, most_received;
  bool packs_own_rows;  // the row outbox holds this rank's own rows too
  LLPacket* arrived;
  std::int64_t row_flags;  // in the inbox
  DType combine_type;
  CombineRowLayout row;
};

// Upper bound of a rank's tasks.
constexpr int hop_tasks(int ranks, int channels) {
  return (4 * ranks + 1) * channels;
}

// Blocks of a launch that may use at most `blocks`. More than the tasks need are of no use.
constexpr int hop_blocks(const HopArguments& call, int blocks) {
  const int warps = call.threads / 32, tasks = hop_tasks(call.wires.ranks, call.channels),
            useful = call.content == HopContent::headers ? 1 : (tasks + warps - 1) / warps;
  return std::clamp(blocks, 1, useful);
}
static_assert(sizeof(HopArguments) <= 4096);  // parameters of a kernel

// Call on the lane's device before the first launch for it: a kernel that is loaded while others wait for it
// would wait for them.
void prepare_hops(int ranks);

void launch_hops(const HopArguments& arguments, const LaunchShape& shape, cudaStream_t stream);

}  // namespace ferry::cuda
