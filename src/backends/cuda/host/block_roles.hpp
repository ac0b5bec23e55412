// How many blocks of a fused launch take each role: sender, metadata block, receiver or reducer.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "backends/cuda/dispatch/send_partition.hpp"
#include "ferry/config.hpp"

namespace ferry::cuda {

// The measured constants from which block_roles.cpp computes how many blocks send and how many receive.
// `scripts/gpu tune` measures them again on another machine.

// Costs are the time that one block (multiprocessor) takes for a token or a row. Only ratios between costs of
// the same operation matter.
enum class RoleCost : int {
  dispatch_plan,         // sender: plan a token
  dispatch_store,        // sender: store a row at one rank
  dispatch_copy,         // receiver: copy a row within this rank
  dispatch_fetch,        // receiver: copy a row from staging, in addition to its own copy
  dispatch_receive,      // receiver: handle a message
  encode,                // sender: quantise a token
  encoded_store,         // sender: store a quantised row at one rank
  encoded_copy,          // receiver: copy a quantised row
  encoded_receive,       // receiver: handle a message with a quantised row
  few_sender_share,      // few tokens: share of the blocks that send
  few_sender_share_fp8,  // few tokens: share of the blocks that send, if they quantise
  metadata_block_share,  // few tokens: most blocks that send metadata, as a share of all
  combine_staged,        // reducer: add a partial sum from staging
  combine_store,         // reducer: store a token's result
  combine_move,          // reducer: store an unreduced row
  combine_read_summed,   // sender: read a row that the expert layer has summed (rank_major)
  combine_send_sum,      // sender: send a partial sum
  combine_push_sum,      // sender: least time for a partial sum, from the rate at which an SM stores at peers
  combine_push_row,      // sender: least time for a row, from the same rate
  combine_link,          // least time for a row on the link, by all senders together
  combine_max_share,     // most senders, as a share of the blocks of a large launch
  combine_max_share_few,  // most senders, as a share of the blocks, where tokens are few
  count_
};
inline constexpr auto kRoleCosts = static_cast<std::size_t>(RoleCost::count_);

struct RoleCostEntry {
  RoleCost cost;
  const char* name;  // in FERRY_BLOCK_ROLES and `scripts/gpu tune`
  double value;
  const char* unit;
  const char* bench;     // arguments of the `ferry bench` run whose p50 times chose the value
  const char* measured;  // machine, date and commit
};

// In the order of RoleCost.
const std::array<RoleCostEntry, kRoleCosts>& role_cost_table();

// The values in force.
class RoleCosts {
 public:
  RoleCosts();  // the table's values

  // `overrides`: "name=value,...", empty for none. Throws UsageError for an unknown name or a value that is
  // not a positive number.
  explicit RoleCosts(const std::string& overrides);

  double operator[](RoleCost cost) const { return values_[static_cast<std::size_t>(cost)]; }

 private:
  std::array<double, kRoleCosts> values_;
};

// The table's values. In builds with FERRY_TEST_HOOKS, the environment variable FERRY_BLOCK_ROLES overrides
// them; production builds do not read it, because ranks with different values would still work but be slow.
const RoleCosts& role_costs();

// Properties of a dispatch that decide how much work either role has.
struct DispatchWork {
  bool few;           // fewer than kManyTokens tokens
  bool quantised;     // senders quantise the rows
  bool direct_write;  // senders store rows at their final position, so receivers do not copy them
};

// Sender blocks of a dispatch: at least 1, and less than `blocks` if `blocks` > 1.
int dispatch_senders(int blocks, const Config& config, const DispatchWork& work,
                     const RoleCosts& costs = role_costs());

// Roles in a dispatch of few tokens, where metadata blocks count tokens and send their metadata, so that
// senders need not wait for anything. `tokens`: their number or an upper bound; values from kManyTokens on
// count as kManyTokens - 1. All zero, which stands for no such roles, where there are fewer than 8 blocks, or
// where most ranks get none of a token's messages and metadata for them would be wasted.
DispatchBlocks dispatch_few_token_blocks(int blocks, const Config& config, std::int64_t tokens,
                                         bool quantised, const RoleCosts& costs = role_costs());

// Sender blocks of a combine. `own_staged`: rows of this rank's own tokens go through staging.
// `shared_terms`: shared experts whose rows are added.
int combine_senders(int blocks, const Config& config, Reduction reduction, bool own_staged,
                    int shared_terms = 0, const RoleCosts& costs = role_costs());

}  // namespace ferry::cuda
