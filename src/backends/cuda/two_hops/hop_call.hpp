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
#include "backends/cuda/two_hops/hop_layout.hpp"
#include "base/host_device.hpp"
#include "base/integers.hpp"
#include "ferry/topology.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cuda {

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
