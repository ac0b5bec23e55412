// Memory of two hops: windows, signals, working memory. Without CUDA, for size queries.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "ferry/config.hpp"
#include "ferry/topology.hpp"

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

// Bytes of a HopTaskState (hop_state.cuh). A thread of a narrow kernel keeps counts of one rank, a thread of
// a wide kernel of eight.
constexpr std::int64_t hop_task_bytes(bool wide) {
  return wide ? 120 : 64;
}

// Upper bound of a rank's tasks.
constexpr int hop_tasks(int ranks, int channels) {
  return (4 * ranks + 1) * channels;
}

// Layout of a lane's windows. `header_bytes`: of a call header (EngineLayout).
HopLayout hop_layout(const Config& config, const Topology& topology, std::int64_t header_bytes,
                     std::int64_t row_bytes);

// What the launches that move messages take: threads of a block (kHopThreads or kManyHopThreads), and
// channels of a stream, the layout's or fewer. The layout does not depend on max_tokens.
struct HopWidth {
  std::int32_t threads, channels;

  static HopWidth of(const Config& config, const HopShape& shape);
};

// What hops have moved, as WireCounts counts it.
struct HopCounts {
  unsigned long long bytes, messages;
};

// Working memory of a lane; starts as zeros.
struct HopWorkingMemory {
  std::int64_t counts, agreed, states, bytes;
  std::int64_t sections;  // [R] the lane's windows on each rank, for large groups (LaneView::symmetric)

  static HopWorkingMemory of(const HopShape& shape);
};

}  // namespace ferry::cuda
