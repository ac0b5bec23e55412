// Counts what a dispatch of given ids delivers: one launch, whose result the host waits for.
#pragma once

#include <algorithm>

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {

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

}  // namespace ferry::cuda
