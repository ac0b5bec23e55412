#include "backends/cuda/host/block_roles.hpp"

#include <algorithm>
#include <cmath>

#include "backends/cuda/device/lane_view.hpp"

namespace ferry::cuda {
namespace {

// Ranks that a token with experts anywhere reaches on average: each of R with 1 - (1 - 1/R)^K.
double reached(const Config& config) {
  const double ranks = config.placement.ranks();
  return ranks * (1 - std::pow(1 - 1 / ranks, config.top_k));
}

// 1 to blocks - 1.
int share_of(int blocks, double senders, double others) {
  const int share = static_cast<int>(std::lround(blocks * senders / (senders + others)));
  return std::max(1, std::min(share, blocks - 1));
}

// More than keep the link busy make combine slower where few are left to bring home. `sending`: work of a
// token that sends `sent` rows. `few`: tokens, where a few more let two warps share a row.
int most_senders(int blocks, double sending, double sent, bool few) {
  constexpr double kLink = 0.2;  // what a row takes there
  constexpr int kFewBlocks = 64;
  const double share = few ? 0.5 : 0.45;
  const double most = blocks <= kFewBlocks && sent > 0 ? sending / (kLink * sent) : share * blocks;
  return std::max(1, static_cast<int>(std::lround(most)));
}

// About `senders` of `blocks` blocks, so many that warps which send several of `tokens` whole rows have the
// same number of them: the last warps to end hold up all.
int evened(int senders, int blocks, std::int64_t tokens) {
  const auto needed = [&](std::int64_t each) {
    return static_cast<int>((tokens + kWorkWarps * each - 1) / (kWorkWarps * each));
  };
  const std::int64_t workers = std::int64_t{senders} * kWorkWarps, each = (tokens + workers - 1) / workers;
  if (each < 2) return senders;
  const int fewer = needed(each), more = needed(each - 1);
  return more < blocks && more - senders <= senders - fewer ? more : fewer;
}

}  // namespace

int dispatch_senders(int blocks, const Config& config, const DispatchWork& work) {
  // Enough warps for shares of rows, enough to quantise.
  if (work.few) return std::clamp(blocks * (work.quantised ? 6 : 5) / 16, 1, kMaxSenders);
  // Work in quarters of a microsecond of a block, from the times of two and four ranks with few
  // multiprocessors and either role as the bound (docs/performance-gpus.md).
  constexpr double kPlan = 1.2, kStore = 1.05, kCopy = 0.9, kFetch = 0.55, kTake = 0.78;
  constexpr double kEncode = 2.0, kStoreEncoded = 0.4, kCopyEncoded = 0.6, kTakeEncoded = 0.6;
  const double messages = reached(config), own = messages / config.placement.ranks();
  const double stored = work.quantised ? messages : messages - own;
  const double rows = config.layout == Layout::rank_major ? messages : config.top_k;
  const double sending = work.quantised ? kEncode + stored * kStoreEncoded : kPlan + stored * kStore;
  const double copied = work.placed ? rows - stored : rows, fetched = work.placed ? 0 : stored;
  const double receiving = work.quantised ? copied * kCopyEncoded + messages * kTakeEncoded
                                          : copied * kCopy + fetched * kFetch + messages * kTake;
  return std::min(share_of(blocks, sending, receiving), kMaxSenders);
}

DispatchBlocks dispatch_by_token(int blocks, const Config& config, std::int64_t tokens, bool quantised) {
  // They tell every rank of every token: not where most would be told of nothing.
  if (blocks < 8 || config.placement.ranks() > 2 * config.top_k) return {};
  // A warp has as many tokens as it plans at once, if there are blocks enough; and one block coordinates.
  const int at_once = config.top_k <= 8 ? 4 : config.top_k <= 16 ? 2 : 1;
  const std::int64_t each = std::int64_t{kWorkWarps} * at_once;
  const std::int64_t most = std::min(tokens, kPlaceFrom - 1);
  const int tellers =
      static_cast<int>(std::clamp<std::int64_t>((most + each - 1) / each, 1, std::max(blocks / 16, 1)));
  const int metadata_blocks = tellers + 1;
  const DispatchWork work{.few = true, .quantised = quantised, .placed = false};
  return {evened(dispatch_senders(blocks - metadata_blocks, config, work), blocks - metadata_blocks, most),
          metadata_blocks};
}

// Work in rows that are added up by a block with a weight each, from the times of two and four ranks with few
// multiprocessors and either role as the bound (docs/performance-gpus.md).
int combine_senders(int blocks, const Config& config, Reduction reduction, bool own_staged) {
  constexpr double kStaged = 0.9, kStore = 1.15, kMove = 0.9, kPass = 0.72, kSend = 0.65;
  // What a multiprocessor can store at others, of which it takes several to keep it busy: sums and rows.
  constexpr double kPushSum = 2.2, kPushRow = 1.6;
  const double ranks = config.placement.ranks(), messages = reached(config);
  const double away = own_staged ? 1 : 1 - 1 / ranks;  // share of rows and sums that travel
  double sent, sending, home;
  if (reduction == Reduction::partial) {
    sent = messages * away;
    double read = away * config.top_k, read_at_home = (1 - away) * config.top_k;
    if (config.layout == Layout::rank_major) read = kPass * sent, read_at_home = kPass * (messages - sent);
    sending = std::max(read + kSend * sent, kPushSum * sent);
    home = kStaged * sent + read_at_home + kStore;
  } else {
    sent = away * config.top_k;
    sending = kPushRow * sent;
    home = reduction == Reduction::exact ? config.top_k + kStore : kMove * config.top_k;
  }
  return std::min(share_of(blocks, sending, home),
                  most_senders(blocks, sending, sent, config.max_tokens < kPlaceFrom));
}

}  // namespace ferry::cuda
