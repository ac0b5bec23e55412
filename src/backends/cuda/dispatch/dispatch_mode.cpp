#include "backends/cuda/dispatch/dispatch_mode.hpp"

#include "backends/cuda/dispatch/dispatch.hpp"

namespace ferry::cuda {

DispatchMode dispatch_mode(const DispatchArguments& call, Phase phase) {
  if (phase == Phase::send) return DispatchMode::send_phase;
  if (phase == Phase::receive) return DispatchMode::receive_phase;
  if (call.apply_weights || call.dot_rows != nullptr) return DispatchMode::generic;
  if (call.by_plan) return DispatchMode::by_plan;
  // Too few blocks to spare some for metadata, or too many ranks to tell each of every token.
  if (call.few_token_blocks.metadata_blocks == 0) return DispatchMode::many_tokens;
  if (call.device_tokens != nullptr) return DispatchMode::count_on_device;
  return call.tokens < kPlaceFrom ? DispatchMode::few_tokens : DispatchMode::many_tokens;
}

}  // namespace ferry::cuda
