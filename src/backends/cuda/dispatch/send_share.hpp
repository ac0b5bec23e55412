// Who sends what of a call's tokens.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "layout/device_signals.hpp"

namespace ferry::cuda {

// Of a block of dispatch: few warps that have all the registers they want. With twice as many, what did not
// fit lay in memory whose cache every acquire empties (docs/performance-gpus.md).
inline constexpr int kWorkWarps = 7;
inline constexpr int kBlockWarps = kWorkWarps + 1;  // and the one that announces
inline constexpr int kBlockThreads = 32 * kBlockWarps;

// From so many tokens on, a rank waits for the counts of all to store rows where they stay; with fewer,
// waiting costs more than the receivers' copies.
inline constexpr std::int64_t kPlaceFrom = 256;

// Halvings of a row that make quarters of it.
inline constexpr int kQuarterSplits = 2;

// By how many halvings of `rows` rows all of `workers` warps have work, as far as quarters go.
FERRY_HD int splits_of(std::int64_t rows, int workers) {
  return 4 * rows <= workers ? kQuarterSplits : 2 * rows <= workers ? 1 : 0;
}

// Of a fused launch of several blocks. Where messages lie by number, those that send tell of tokens too;
// where they lie by token, metadata_blocks do.
struct DispatchBlocks {
  int senders = 0;          // blocks that send
  int metadata_blocks = 0;  // blocks after those that tell of tokens, count them and keep the plan, or 0
};

// How tokens are shared out: in units, each a share of a token's row; every warp sends a run of them.
struct SendPartition {
  std::int32_t tokens;
  int splits;               // a token's row is shared by 1 << splits warps, 1, 2 or 4
  int workers;              // warps that send, in all blocks
  std::int32_t each, more;  // units of a warp, and how many have one more

  FERRY_HD static SendPartition of(std::int64_t tokens, int senders) {
    return cut(tokens, senders, splits_of(tokens, senders * kWorkWarps));
  }
  // Of whole tokens.
  FERRY_HD static SendPartition whole(std::int64_t tokens, int blocks) { return cut(tokens, blocks, 0); }
  FERRY_HD static SendPartition cut(std::int64_t tokens, int blocks, int splits) {
    SendPartition share{static_cast<std::int32_t>(tokens), splits, blocks * kWorkWarps, 0, 0};
    const std::int32_t units = share.tokens << share.splits;
    share.each = units / share.workers;
    share.more = units - share.each * share.workers;
    return share;
  }
  // Workers past the last have none.
  FERRY_HD std::int32_t unit_begin(int worker) const {
    const std::int32_t begin = worker * each + (worker < more ? worker : more), units = tokens << splits;
    return begin < units ? begin : units;
  }
  FERRY_HD std::int32_t token_begin(int worker) const { return unit_begin(worker) >> splits; }
  // Past the last token it has a unit of.
  FERRY_HD std::int32_t token_end(int worker) const {
    return (unit_begin(worker + 1) + (1 << splits) - 1) >> splits;
  }
  // The last worker whose units begin with this token or before: token_begin(worker) <= token.
  FERRY_HD int last_worker(std::int32_t token) const {
    const std::int32_t unit = (token << splits) + (1 << splits) - 1;
    if (each == 0) return unit;
    const std::int32_t longer = more * (each + 1);
    return unit < longer ? unit / (each + 1) : more + (unit - longer) / each;
  }
};

}  // namespace ferry::cuda
