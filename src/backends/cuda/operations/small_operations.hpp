// Kernels of the small operations, as host code sees them: step metadata, one value a route, counts,
// all-gather-v and reduce-scatter-v, refusals; and those around messages that a carrier moves.
#pragma once

#include <algorithm>

#include "backends/cuda/device/phase.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {

struct NumberArguments {
  LaneView lane;
  AgreedOptions terms;
  std::int32_t number;
  const std::int32_t* device_number;  // or null
  void* into;                         // device memory
};

// The kernel of a NumberCall.
const Kernel<NumberArguments>& number_kernel(Operation operation, Phase phase);

// Values of routes [N, K] go to rows [total], or with return_values those of rows to routes.
struct RouteValuesArguments {
  LaneView lane;
  AgreedOptions terms;
  void* plan;
  const float* from;
  float* to;
  Phase phase = Phase::fused;
  Operation operation = Operation::route_values;  // the operation that needs the values
  bool continues = false;                         // the call goes on: its number is not stored

  FERRY_HD bool returns() const { return operation == Operation::return_values; }
};

extern const Kernel<RouteValuesArguments> kRouteValuesKernel;

struct RefusalArguments {
  LaneView lane;
  Operation operation;
  ErrorRecord refusal;
};

// Posts the refusal, and ends the call when all ranks have called.
extern const Kernel<RefusalArguments> kRefusalKernel;
extern const Kernel<RefusalArguments> kPostRefusalKernel;  // only posts it

// --- calls whose messages are carried (host/carrier.hpp) ---------------------------------------------------

// Clears the slot metadata of all messages from this rank, before it sends by a plan. A damaged plan leaves
// out messages; what earlier calls have stored there must not be taken for them.
extern const Kernel<LaneView> kClearMetadataKernel;

struct ArrivedMessages {
  LaneView lane;
  std::int32_t from[kMaxDeviceRanks];  // messages that have arrived from each rank
};

// Sets the flags of messages that have arrived, with the number of the lane's next call. Skips messages
// without slot metadata of this call, which their sender has not stored.
extern const Kernel<ArrivedMessages> kMarkArrivedKernel;

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

// --- dispatch_counts: what a dispatch of given ids delivers. One launch, whose result the host waits for.
// ---

// In pinned host memory: written by the kernel, the word `ended` last.
struct HostCounts {
  enum class Result : std::uint64_t { counted = 1, aborted = 2 };

  alignas(16) LLPacket ended;  // the number of the dispatch_counts call that has ended, and its Result
  // Then int32 tokens [R], messages to this rank [R], routes to this rank's experts [local slots],
  // of which the kernel writes L; the memory starts as zeros.

  static constexpr std::int64_t bytes(int ranks, int slots) {
    return static_cast<std::int64_t>(sizeof(HostCounts)) + 4 * (2 * std::int64_t{ranks} + slots);
  }
  FERRY_HD std::int32_t* tokens() { return reinterpret_cast<std::int32_t*>(this + 1); }
  FERRY_HD std::int32_t* messages(int ranks) { return tokens() + ranks; }
  FERRY_HD std::int32_t* routes(int ranks) { return messages(ranks) + ranks; }
};

struct CountArguments {
  LaneView lane;
  AgreedOptions terms;
  const void* ids;
  bool wide_ids;  // int64
  std::int32_t tokens;
  HostCounts* host;
  std::uint64_t call;  // of dispatch_counts on this lane
  bool posts_only;     // the kernel ends when it has posted this rank's counts; the call takes no number
};

extern const Kernel<CountArguments> kCountKernel;

inline constexpr int kClusterThreads = 512;   // threads of a block
inline constexpr int kMostClusterBlocks = 8;  // the most that every GPU supports in a cluster

// The shape of a launch that counts `tokens` tokens.
inline LaunchShape cluster_shape(std::int64_t tokens) {
  const std::int64_t blocks = (tokens + kClusterThreads - 1) / kClusterThreads;
  return {.blocks = static_cast<int>(std::clamp<std::int64_t>(blocks, 1, kMostClusterBlocks)),
          .cluster = true};
}

// --- all_gather_v and reduce_scatter_v: rows of all ranks without routing. One launch each.
// -----------------

// Arguments of both operations.
struct GatherArguments {
  LaneView lane;
  AgreedOptions terms;
  const std::byte* rows;
  std::byte* out;  // `gathered`, or `sums`
  std::int64_t row_bytes;
  std::int64_t held;                 // as GatherTerms::held
  std::int64_t place;                // GatherTerms::place + 1; 0: apart
  std::int32_t count;                // this rank's rows; with device_count the most it may be
  std::int32_t first, members;       // the ranks that gather from each other: [first, first + members)
  const std::int32_t* device_count;  // or null
};

// Blocks of values that one rank adds, in this order. Used over an engine, which has delivered them.
struct AddedBlocks {
  const std::byte* block[kMaxDeviceRanks];
  std::int32_t first = 0, members;
  std::byte* out;
  std::int64_t bytes;  // of a block
};

extern const Kernel<GatherArguments> kAllGatherKernel;
extern const Kernel<GatherArguments> kReduceScatterKernels[3];  // by DType of the values
extern const Kernel<AddedBlocks> kAddBlocksKernels[3];          // by DType of the values

}  // namespace ferry::cuda
