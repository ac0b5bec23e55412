#include "backends/cuda/two_hops/hop_layout.hpp"

#include <algorithm>

#include "backends/cuda/host/memory_layout.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"

namespace ferry {
namespace cuda {
namespace {

// If Config::window is not set: bytes of all windows of a hop on a rank, and of its send staging.
constexpr std::int64_t kWindowsBytes = 24 << 20, kStagingBytes = 128 << 20;

// From this many tokens, puts gain from more channels and threads (docs/log/2026-11-27-gpu.md).
constexpr int kManyHopTokens = 1024;

// Threads of a block at most, by which channels are counted. Not tried in groups that need wide kernels.
int most_threads(const Config& config, int ranks) {
  return config.backend == BackendKind::nvshmem && ranks <= kNarrowRanks ? kManyHopThreads : kHopThreads;
}

// Channels of a stream, the same on all ranks. A few suffice for a window of few messages. Where each still
// has two slots, there are as many as 24 blocks have warps for them. The slots are divided evenly, so some of
// a window may be unused.
int channels_of(int ranks, int window, int threads) {
  const int warps = 24 * threads / 32, few = std::clamp(std::min(64 / ranks, window), 1, 16),
            channels = std::max(few, std::min({window / 2, warps / ranks, warps / 2}));
  const bool lacks_second_slots = channels < window && window < 2 * channels;
  return lacks_second_slots ? window / 2 : channels;
}

}  // namespace

HopLayout hop_layout(const Config& config, const Topology& topology, std::int64_t header_bytes,
                     std::int64_t row_bytes) {
  HopShape shape;
  shape.ranks = topology.ranks();
  for (int node = 0; node < topology.nodes(); ++node)
    shape.node_ranks = std::max(shape.node_ranks, static_cast<std::int32_t>(topology.ranks_of(node).size()));
  shape.header_bytes = header_bytes;
  shape.payload_bytes = align_up(device_layout(config).exchange.shape.message_bytes, 16);
  shape.metadata_bytes = static_cast<std::int64_t>(sizeof(LLPacket)) * config.top_k;
  shape.row_bytes = row_bytes;
  shape.composes = chosen_hops(config, topology) == Hops::two && topology.nodes() < topology.ranks();
  shape.channels = shape.slots = 1;
  // No window holds more messages than a rank can send.
  const std::int64_t most = std::int64_t{config.max_tokens} * config.top_k,
                     windows = std::min(kWindowsBytes, kStagingBytes / shape.node_ranks),
                     share = windows / shape.ranks / HopLayout::of(shape).slot_bytes[0],
                     window = std::clamp<std::int64_t>(config.window > 0 ? config.window : share, 1, most);
  shape.channels = channels_of(shape.ranks, static_cast<int>(window), most_threads(config, shape.ranks));
  shape.slots = static_cast<std::int32_t>(window / shape.channels);
  return HopLayout::of(shape);
}

HopWidth HopWidth::of(const Config& config, const HopShape& shape) {
  const int threads = config.max_tokens >= kManyHopTokens ? most_threads(config, shape.ranks) : kHopThreads,
            channels = channels_of(shape.ranks, shape.channels * shape.slots, threads);
  return {takes_wide_kernels(shape.ranks) ? kHopThreads : threads, std::min(shape.channels, channels)};
}

HopWorkingMemory HopWorkingMemory::of(const HopShape& shape) {
  HopWorkingMemory memory{};
  memory.counts = 0;
  memory.agreed = 4 * sizeof(HopCounts);
  memory.sections = 256;
  memory.states = memory.sections + align_up(std::int64_t{8} * shape.ranks, 256);
  memory.bytes = memory.states + std::int64_t{hop_tasks(shape.ranks, shape.channels)} * 32 *
                                     hop_task_bytes(takes_wide_kernels(shape.ranks));
  return memory;
}

}  // namespace cuda
}  // namespace ferry
