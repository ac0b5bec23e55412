// How many blocks of a fused launch send; the others receive, or bring home.
#pragma once

#include "backends/cuda/dispatch/send_partition.hpp"
#include "ferry/config.hpp"

namespace ferry::cuda {

// What decides how much work either role has, for a token whose experts are anywhere.
struct DispatchWork {
  bool few;        // tokens: fewer than kPlaceFrom
  bool quantised;  // before they travel
  bool placed;     // rows are stored where they stay
};

// At least 1, and less than `blocks` if that is more than 1.
int dispatch_senders(int blocks, const Config& config, const DispatchWork& work);

// Of a dispatch of fewer than kPlaceFrom tokens, and at most `tokens`, which may be a larger bound: some
// blocks tell of tokens, so that those that send need not wait for anything. None where blocks are few, or
// where most ranks would be told that nothing comes.
DispatchBlocks dispatch_by_token(int blocks, const Config& config, std::int64_t tokens, bool quantised);

// `own_staged`: what a rank brings to itself goes through staging.
int combine_senders(int blocks, const Config& config, Reduction reduction, bool own_staged);

}  // namespace ferry::cuda
