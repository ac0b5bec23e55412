// How a dispatch's tokens are divided among the warps that send them.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "layout/device_signals.hpp"

namespace ferry::cuda {

// Warps of a dispatch block. Few, so that each has all the registers it wants: with twice as many, values
// spilled to local memory, whose cache every acquire invalidates (docs/log/2026-11-22-gpu.md).
inline constexpr int kWorkWarps = 7;
inline constexpr int kBlockWarps = kWorkWarps + 1;  // and the publisher warp
inline constexpr int kBlockThreads = 32 * kBlockWarps;

// Tokens from which a rank waits for the counts of all ranks and then writes rows to their final position
// (direct write). With fewer tokens the wait costs more than the receivers' copies out of staging.
inline constexpr std::int64_t kManyTokens = 256;

inline constexpr int kLog2Quarters = 2;  // log2(quarters per row)

// log2 of the segments into which each of `rows` rows is cut: as many as give each of `workers` warps work, a
// quarter of a row at least.
FERRY_HD int log2_segments_for(std::int64_t rows, int workers) {
  return 4 * rows <= workers ? kLog2Quarters : 2 * rows <= workers ? 1 : 0;
}

// Blocks by role, in a fused launch of several blocks; the others receive.
struct DispatchBlocks {
  int senders = 0;
  int metadata_blocks =
      0;  // mode of few tokens: they follow the senders, and the last is the coordinator; otherwise 0
};

// A token's row is cut into 1, 2 or 4 segments; a segment is the work of one warp. Each warp has consecutive
// segments: warp w of the senders, those in [segment_begin(w), segment_begin(w + 1)).
struct SendPartition {
  std::int32_t tokens;
  int log2_segments;        // of a row
  int workers;              // warps that send, in all blocks
  std::int32_t each, more;  // segments of a warp; the first `more` warps have one more

  FERRY_HD static SendPartition of(std::int64_t tokens, int senders) {
    return cut(tokens, senders, log2_segments_for(tokens, senders * kWorkWarps));
  }
  // Rows stay whole.
  FERRY_HD static SendPartition whole(std::int64_t tokens, int blocks) { return cut(tokens, blocks, 0); }
  FERRY_HD static SendPartition cut(std::int64_t tokens, int blocks, int log2_segments) {
    SendPartition partition{static_cast<std::int32_t>(tokens), log2_segments, blocks * kWorkWarps, 0, 0};
    const std::int32_t segments = partition.tokens << partition.log2_segments;
    partition.each = segments / partition.workers;
    partition.more = segments - partition.each * partition.workers;
    return partition;
  }
  // Workers past the last have no segments.
  FERRY_HD std::int32_t segment_begin(int worker) const {
    const std::int32_t begin = worker * each + (worker < more ? worker : more),
                       segments = tokens << log2_segments;
    return begin < segments ? begin : segments;
  }
  // The worker's first token, and the one past its last, of tokens it has any segment of.
  FERRY_HD std::int32_t token_begin(int worker) const { return segment_begin(worker) >> log2_segments; }
  FERRY_HD std::int32_t token_end(int worker) const {
    return (segment_begin(worker + 1) + (1 << log2_segments) - 1) >> log2_segments;
  }
  // The last worker with token_begin(worker) <= token.
  FERRY_HD int last_worker(std::int32_t token) const {
    const std::int32_t segment = (token << log2_segments) + (1 << log2_segments) - 1;
    if (each == 0) return segment;
    const std::int32_t longer = more * (each + 1);
    return segment < longer ? segment / (each + 1) : more + (segment - longer) / each;
  }
};

}  // namespace ferry::cuda
