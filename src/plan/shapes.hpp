// The sizes that follow from a complete configuration: capacities, groups, and the shapes of plans and
// staging.
//
// "Complete" means that every default is filled in, the placement among them: see exchange/configuration.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/config.hpp"
#include "format/parts.hpp"
#include "layout/exchange_layout.hpp"
#include "layout/plan_layout.hpp"
#include "plan/slot.hpp"

namespace ferry {

PlanShape plan_shape(const Config& config);

// `signal_bytes`: what the backend's flags and counts take in symmetric memory, for one lane.
ExchangeShape exchange_shape(const Config& config, std::int64_t signal_bytes);

// Whether every route has a row of values of its own, of its expert.
constexpr bool has_route_rows(Layout layout) {
  return layout == Layout::expert_major || layout == Layout::expert_padded;
}

// Rows that `rank` has memory for, all groups together; expert_indexed: positions.
std::int64_t row_capacity(const Config& config, int rank);
// expert_padded: rows that one expert of `rank` has memory for. Other layouts: row_capacity().
std::int64_t group_capacity(const Config& config, int rank);
// What the memory of `rank`'s received parts has room for: the rows of row_capacity(), or with expert_indexed
// one for each token of every rank.
RowRoom row_room(const Config& config, int rank);
// Bytes of received rows of any format whose messages are not larger than those of the configuration's: a
// received row takes at most the bytes that it takes in a message, and scales in columns those that align
// them. Without what aligns parts, and without what tiles leave unused.
std::int64_t receive_buffer_bytes(const Config& config, int rank);
// Places for routed experts on `rank`: its local experts, or Config::local_slots.
int local_slots_of(const Config& config, int rank);
// G: the shared experts and the local slots of `rank`; rank_major: the ranks.
int groups_of(const Config& config, int rank);
// [G] the expert of each group, those of shared experts from E on; -1: a source rank, or an empty slot.
std::vector<std::int32_t> group_experts(const Config& config, int rank);

// The positions of shared rows on `rank` in a dispatch of `tokens` tokens.
SharedRows shared_rows(const Config& config, int rank, std::int64_t tokens);

// Rows of a rank: row_offsets[G] of a dispatch of `tokens` tokens in which the ranks send it `messages`
// messages, and `routes` [local slots] routes to its experts.
std::int64_t total_rows(const Config& config, int rank, std::int64_t tokens, std::int64_t messages,
                        std::span<const std::int32_t> routes);

// The call summary that a host backend sends to every peer in every call. Its fixed words: three about
// optional arguments, three about rows, one about tokens. A dispatch appends int32 counts [E] and tokens [R].
inline constexpr int kCallSummaryWords = 6;
std::int64_t call_summary_bytes(const Config& config);

// Hash of everything that decides the row of a route. Two exchanges may use each other's plans if their
// hashes are equal.
std::uint64_t row_order_hash(const Config& config);

}  // namespace ferry
