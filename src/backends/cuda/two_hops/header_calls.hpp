// Launches beside those of the phases of calls in two hops: calls that exchange headers alone, and what ties
// two calls into one combine. Each kind has a launch before launch_hops() and one after it.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda {

void prepare_header_calls();  // part of prepare_hops()

// Clears the slot metadata of all messages in the inbox from other ranks, before a call by a plan: a damaged
// plan expects messages that do not come. `lane`: as the phases of the call see it.
void launch_clear_inbox(const LaneView& lane, cudaStream_t stream);

// Ends a call of headers alone: reports headers that differ.
struct AgreeArguments {
  LaneView lane;
  AgreedOptions terms;
};
extern const Kernel<AgreeArguments> kAgreeKernel;

// A combine takes two call numbers, because its weights may travel in a call of their own, and a rank that
// refuses a combine does not know whether those of its peers do. This takes the second without a call.
void launch_skip_number(const LaneView& lane, cudaStream_t stream);

// Launched before and after the second of two calls. If the first has been aborted, for instance because a
// rank has refused the combine, the second only takes its number.
struct MuteArguments {
  LaneView lane;
  std::uint64_t* muted;  // device memory of the lane
};
void launch_mute(const MuteArguments& arguments, cudaStream_t stream);
void launch_unmute(const MuteArguments& arguments, cudaStream_t stream);

}  // namespace ferry::cuda
