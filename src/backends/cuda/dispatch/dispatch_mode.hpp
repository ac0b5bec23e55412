// Dispatch modes: which kernel runs a call. docs/kernels.md has a table of block roles for each.
#pragma once

#include "backends/cuda/device/phase.hpp"

namespace ferry::cuda {

struct DispatchArguments;

enum class DispatchMode {
  many_tokens,      // routes from ids; rows are written to their final place where the receiver allows it
  few_tokens,       // routes from ids; senders send at once, metadata blocks count and write slot metadata
                    // meanwhile
  count_on_device,  // N in device memory: the kernel reads it and runs as many_tokens or few_tokens
  by_plan,          // routes from a plan
  generic,          // receivers weight rows or compute dot products; routes from ids or from a plan
  send_phase,       // split call: the first of two kernels
  receive_phase,    // split call: the second
};

// The mode of a call whose arguments are complete but for what the launch sets.
DispatchMode dispatch_mode(const DispatchArguments& call, Phase phase);

// Whether metadata blocks may take part, as call.few_token_blocks says.
constexpr bool has_metadata_blocks(DispatchMode mode) {
  return mode == DispatchMode::few_tokens || mode == DispatchMode::count_on_device;
}

}  // namespace ferry::cuda
