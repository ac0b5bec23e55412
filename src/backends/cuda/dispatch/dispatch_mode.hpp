// Dispatch modes: with the phase, they choose the kernel of a call. docs/kernels.md has a table of block
// roles for each.
#pragma once

#include <cstdint>

#include "backends/cuda/device/phase.hpp"
#include "backends/cuda/dispatch/send_partition.hpp"

namespace ferry::cuda {

enum class DispatchMode {
  many_tokens,      // routes from ids; rows are written to their final position if the receiver accepts that
  few_tokens,       // routes from ids; senders send at once, metadata blocks count meanwhile
  count_on_device,  // N in device memory: the kernel reads it and runs as many_tokens or few_tokens
  by_plan,          // routes from a plan
  generic,          // receivers compute values (DispatchModeInput), or the input is replicated; routes from
                    // ids or from a plan. Where tokens go to every rank: all but few tokens from ids
};

// The facts that determine the mode.
struct DispatchModeInput {
  Phase phase;
  bool computes_values;  // receivers weight rows, compute dot products or encode rows (input_scales)
  bool by_plan;
  bool replicated;           // the input
  bool to_every_rank;        // Transfer::gather
  bool has_metadata_blocks;  // enough blocks to spare some, and few enough ranks to send each the metadata of
                             // every token
  bool count_on_device;      // `tokens` is an upper bound
  std::int64_t tokens;
};

// A split call has the modes many_tokens, for any number of tokens, and generic.
inline DispatchMode dispatch_mode(const DispatchModeInput& input) {
  if (input.computes_values) return DispatchMode::generic;
  if (input.phase != Phase::fused) {
    const bool common = !input.by_plan && !input.replicated && !input.to_every_rank;
    return common ? DispatchMode::many_tokens : DispatchMode::generic;
  }
  if (input.to_every_rank) {
    if (input.by_plan || !input.has_metadata_blocks || input.tokens >= kManyTokens)
      return DispatchMode::generic;
    return input.count_on_device ? DispatchMode::count_on_device : DispatchMode::few_tokens;
  }
  if (input.by_plan) return DispatchMode::by_plan;
  if (input.replicated) return DispatchMode::generic;
  if (!input.has_metadata_blocks) return DispatchMode::many_tokens;
  if (input.count_on_device) return DispatchMode::count_on_device;
  return input.tokens < kManyTokens ? DispatchMode::few_tokens : DispatchMode::many_tokens;
}

// Whether a kernel of this mode may have metadata blocks.
constexpr bool may_have_metadata_blocks(DispatchMode mode) {
  return mode == DispatchMode::few_tokens || mode == DispatchMode::count_on_device;
}

}  // namespace ferry::cuda
