#include "backends/cuda/host/block_roles.hpp"

#include <algorithm>
#include <cmath>

#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda {
namespace {

// The share of a token's routes and messages that its source rank plans. With replicated input every rank is
// a source of the token, and plans its own routes.
double planned_part(const Config& config) {
  return config.input == Input::replicated ? 1.0 / config.placement.ranks() : 1.0;
}

// The ranks to which a rank's messages go.
double destinations(const Config& config) {
  return config.input == Input::replicated ? 1 : config.placement.ranks();
}

// Expected number of ranks that a token is sent to, its K experts being uniform over R ranks:
// R (1 - (1 - 1/R)^K), or all.
double ranks_per_token(const Config& config) {
  const double ranks = config.placement.ranks();
  if (config.transfer == Transfer::gather) return ranks;
  return planned_part(config) * ranks * (1 - std::pow(1 - 1 / ranks, config.top_k));
}

// Divides the blocks in proportion to the senders' and the receivers' work; 1 to blocks - 1 senders.
int proportional_senders(int blocks, double sender_work, double receiver_work) {
  const int senders = static_cast<int>(std::lround(blocks * sender_work / (sender_work + receiver_work)));
  return std::max(1, std::min(senders, blocks - 1));
}

// Senders of a combine beyond this number only slow it down: the link is busy, and fewer blocks are left to
// reduce. `sender_work`: for a token, of which `sent` rows are sent. `few`: tokens; there, a few more senders
// let two warps share a row.
int max_combine_senders(int blocks, double sender_work, double sent, bool few, const RoleCosts& costs) {
  constexpr int kSmallLaunch = 64;  // blocks; up to here the link's rate decides
  const double share = costs[few ? RoleCost::combine_max_share_few : RoleCost::combine_max_share];
  const double most = blocks <= kSmallLaunch && sent > 0
                          ? sender_work / (costs[RoleCost::combine_link] * sent)
                          : share * blocks;
  return std::max(1, static_cast<int>(std::lround(most)));
}

// Adjusts a number of sender blocks so that all warps send the same number of whole rows: the last warp to
// finish delays the call. Leaves it unchanged where a warp sends at most one row.
int balance_senders(int senders, int blocks, std::int64_t tokens) {
  const auto blocks_for = [&](std::int64_t rows_per_warp) {
    return static_cast<int>((tokens + kWorkWarps * rows_per_warp - 1) / (kWorkWarps * rows_per_warp));
  };
  const std::int64_t warps = std::int64_t{senders} * kWorkWarps, rows_per_warp = (tokens + warps - 1) / warps;
  if (rows_per_warp < 2) return senders;
  const int fewer = blocks_for(rows_per_warp), more = blocks_for(rows_per_warp - 1);
  return more < blocks && more - senders <= senders - fewer ? more : fewer;
}

}  // namespace

int dispatch_senders(int blocks, const Config& config, const DispatchWork& work, const RoleCosts& costs) {
  if (work.few) {
    const RoleCost share = work.quantised ? RoleCost::few_sender_share_fp8 : RoleCost::few_sender_share;
    return std::clamp(static_cast<int>(blocks * costs[share]), 1, kMaxSenders);
  }
  // For one token: messages, those to this rank itself, rows stored at their destination, and all rows.
  const double messages = ranks_per_token(config), own = messages / destinations(config);
  const double stored = work.quantised ? messages : messages - own;
  const double rows = config.layout == Layout::rank_major ? messages : planned_part(config) * config.top_k;
  const double copied = work.direct_write ? rows - stored : rows, fetched = work.direct_write ? 0 : stored;
  double sender_work, receiver_work;
  if (work.quantised) {
    sender_work = costs[RoleCost::encode] + stored * costs[RoleCost::encoded_store];
    receiver_work = copied * costs[RoleCost::encoded_copy] + messages * costs[RoleCost::encoded_receive];
  } else {
    sender_work = costs[RoleCost::dispatch_plan] + stored * costs[RoleCost::dispatch_store];
    receiver_work = copied * costs[RoleCost::dispatch_copy] + fetched * costs[RoleCost::dispatch_fetch] +
                    messages * costs[RoleCost::dispatch_receive];
  }
  return std::min(proportional_senders(blocks, sender_work, receiver_work), kMaxSenders);
}

DispatchBlocks dispatch_few_token_blocks(int blocks, const Config& config, std::int64_t tokens,
                                         bool quantised, const RoleCosts& costs) {
  const bool gathers = config.transfer == Transfer::gather;
  if (blocks < 8 || (!gathers && config.placement.ranks() > 2 * config.top_k)) return {};
  // A warp gets as many tokens as it plans at once, if there are enough blocks.
  const int threads = gathers ? std::max(config.top_k, config.placement.ranks()) : config.top_k;
  const int planned_at_once = threads <= 8 ? 4 : threads <= 16 ? 2 : 1;
  const std::int64_t tokens_per_block = std::int64_t{kWorkWarps} * planned_at_once;
  const std::int64_t most = std::min(tokens, kManyTokens - 1);
  const int limit = std::max(static_cast<int>(blocks * costs[RoleCost::metadata_block_share]), 1);
  const int counting_blocks =
      static_cast<int>(std::clamp<std::int64_t>((most + tokens_per_block - 1) / tokens_per_block, 1, limit));
  const int metadata_blocks = counting_blocks + 1;  // and the coordinator block
  const DispatchWork work{.few = true, .quantised = quantised, .direct_write = false};
  const int others = blocks - metadata_blocks;
  return {balance_senders(dispatch_senders(others, config, work, costs), others, most), metadata_blocks};
}

int combine_senders(int blocks, const Config& config, Reduction reduction, bool own_staged, int shared_terms,
                    const RoleCosts& costs) {
  // For one token: messages, the share of rows and sums that are sent, and the rows or sums sent.
  const double messages = ranks_per_token(config), routes = planned_part(config) * config.top_k;
  const double away = own_staged ? 1 : 1 - 1 / destinations(config);
  double sent, sender_work, reducer_work;
  if (reduction == Reduction::partial) {
    sent = messages * away;
    double read = away * routes, read_by_reducer = (1 - away) * routes;
    if (config.layout == Layout::rank_major) {
      read = costs[RoleCost::combine_read_summed] * sent;
      read_by_reducer = costs[RoleCost::combine_read_summed] * (messages - sent);
    }
    sender_work =
        std::max(read + costs[RoleCost::combine_send_sum] * sent, costs[RoleCost::combine_push_sum] * sent);
    reducer_work = costs[RoleCost::combine_staged] * sent + read_by_reducer + costs[RoleCost::combine_store];
  } else {
    sent = away * routes;
    sender_work = costs[RoleCost::combine_push_row] * sent;
    reducer_work = reduction == Reduction::exact ? routes + costs[RoleCost::combine_store]
                                                 : costs[RoleCost::combine_move] * routes;
  }
  reducer_work += shared_terms;
  return std::min(proportional_senders(blocks, sender_work, reducer_work),
                  max_combine_senders(blocks, sender_work, sent, config.max_tokens < kManyTokens, costs));
}

}  // namespace ferry::cuda
