// How many blocks of a fused launch take each role: sender, metadata block, receiver or reducer.
#pragma once

#include "backends/cuda/dispatch/send_partition.hpp"
#include "backends/cuda/host/role_costs.hpp"
#include "ferry/config.hpp"

namespace ferry::cuda {

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
