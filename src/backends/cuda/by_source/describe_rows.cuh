// Makes MAX's arrays of a dispatch, and keeps its ids for the combine.
#pragma once

#include "backends/cuda/by_source/source_rows.hpp"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kSourceThreads = 512;

__device__ __forceinline__ std::int64_t thread_of_grid() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ std::int64_t threads_of_grid() {
  return std::int64_t{gridDim.x} * blockDim.x;
}

__device__ __forceinline__ std::int64_t id_of(const Ids& ids, std::int64_t route) {
  return ids.type == IdType::int64 ? static_cast<const std::int64_t*>(ids.data)[route]
                                   : static_cast<const std::int32_t*>(ids.data)[route];
}

// N, which may be known on the device only. The dispatch has reported an N that is out of range; it counts as
// 0.
__device__ __forceinline__ std::int64_t kept_token_count(std::int64_t most,
                                                         const std::int32_t* device_count) {
  if (device_count == nullptr) return most;
  const std::int64_t tokens = *device_count;
  return tokens >= 0 && tokens <= most ? tokens : 0;
}

// [grid] Copies the dispatch's ids.
__device__ inline void keep_ids(const KeepIdsArguments& arguments) {
  const KeepIdsCall& call = arguments.call;
  const std::int64_t tokens = kept_token_count(call.tokens, call.device_count);
  for (std::int64_t route = thread_of_grid(); route < tokens * arguments.lane.top_k;
       route += threads_of_grid())
    call.kept_ids[route] = id_of(call.ids, route);
  if (thread_of_grid() == 0) *call.kept_tokens = static_cast<std::int32_t>(tokens);
}

// [warp] Lists the groups that have rows, in order.
__device__ inline void describe_groups(const DescribeRowsArguments& arguments, std::int64_t total) {
  const DescribeRowsCall& call = arguments.call;
  const int groups = arguments.lane.groups, thread = static_cast<int>(threadIdx.x % 32);
  int number = 0;
  std::int32_t most = 0;
  for (int first = 0; first < groups; first += 32) {
    const int group = first + thread;
    const std::int32_t count = group < groups && total > 0 ? call.received.counts[group] : 0;
    const std::uint32_t filled = __ballot_sync(~0u, count > 0);
    if (count > 0) {
      const int index = number + __popc(static_cast<int>(filled & ((1u << thread) - 1)));
      call.expert_ids[index] = group;
      call.row_offsets[index] = static_cast<std::uint32_t>(call.received.row_offsets[group]);
    }
    number += __popc(static_cast<int>(filled));
    for (int i = 0; i < 32; ++i) most = ::max(most, static_cast<std::int32_t>(__shfl_sync(~0u, count, i)));
  }
  for (int i = number + thread; i <= groups; i += 32) {
    call.row_offsets[i] = static_cast<std::uint32_t>(total);
    if (i < groups) call.expert_ids[i] = -1;
  }
  if (thread != 0) return;
  call.expert_usage_stats[0] = static_cast<std::uint32_t>(most);
  call.expert_usage_stats[1] = static_cast<std::uint32_t>(number);
}

// [grid] Fills the arrays.
__device__ inline void describe_rows(const DescribeRowsArguments& arguments) {
  const DescribeRowsCall& call = arguments.call;
  const LaneView& lane = arguments.lane;
  // An aborted dispatch has no rows.
  const bool usable = check_plan(lane, *arguments.plan.header, -1) == PlanFault::none;
  const std::int64_t total = usable ? *call.received.total : 0;
  if (blockIdx.x == 0 && threadIdx.x < 32) describe_groups(arguments, total);
  for (std::int64_t i = thread_of_grid(); i < std::int64_t{lane.groups} * lane.ranks;
       i += threads_of_grid()) {
    const auto group = static_cast<int>(i / lane.ranks), source = static_cast<int>(i % lane.ranks);
    std::int32_t count = 0;
    if (usable && group < lane.shared_experts) {
      count = source == lane.rank ? call.received.counts[group] : 0;
    } else if (usable) {
      count = arguments.plan.counts[std::int64_t{source} * lane.experts + call.received.group_expert[group]];
    }
    call.counts[i] = count;
  }
  for (std::int64_t row = thread_of_grid(); row < total; row += threads_of_grid()) {
    const Source source = call.received.source[row];
    call.src_info[2 * row] = source.token;
    call.src_info[2 * row + 1] = source.slot;
  }
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
