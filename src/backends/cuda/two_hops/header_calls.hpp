// Launches beside those of the phases of calls in two hops: calls that exchange headers alone. Each kind has
// a launch before launch_hops() and one after it.
#pragma once

#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda {

// Clears the slot metadata of all messages in the inbox from other ranks, before a call by a plan: a damaged
// plan expects messages that do not come. `lane`: as the phases of the call see it.
extern const Kernel<LaneView> kClearInboxKernel;

// Ends a call of headers alone: reports headers that differ.
struct AgreeArguments {
  LaneView lane;
  AgreedOptions terms;
};
extern const Kernel<AgreeArguments> kAgreeKernel;

// Ends a call that this rank has refused.
extern const Kernel<LaneView> kEndRefusalKernel;

}  // namespace ferry::cuda
