#include "backends/cuda/dispatch/dispatch_mode.hpp"

#include "backends/cuda/dispatch/send_partition.hpp"

namespace ferry::cuda {

DispatchMode dispatch_mode(const DispatchModeInput& input) {
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

}  // namespace ferry::cuda
