// A dispatch block's state in shared memory, and the layout of that memory.
#pragma once

#include <algorithm>

#include "backends/cuda/dispatch/dispatch_receive.cuh"
#include "backends/cuda/dispatch/send_by_plan.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

struct DispatchBlockState {
  FlagPublisher<kWorkWarps> publisher;
  ScanScratch scratch;
  CallHeader header;
  Epoch epoch;
  ErrorRecord refusal;
  std::uint64_t number;     // of the call
  std::int64_t tokens;      // N
  SendPartition partition;  // of a metadata block: among the metadata blocks; otherwise among the senders
  BadIdCount bad;
  std::uint32_t direct_write_peers,         // ranks to which this one writes rows directly, one bit each
      direct_writers;                       // ranks that write rows directly here
  SourceSegments segments;                  // into which each source rank cuts its rows
  std::int32_t sender_warps[kKernelRanks];  // warps that send, by source
  std::int32_t
      indexed_tokens[kKernelRanks];  // tokens of sources whose messages are indexed by token; otherwise -1
  std::int32_t rank_tokens[kKernelRanks];  // with shared experts: each rank's N
  bool limits_rows;                        // a rank has a row limit
  bool failed;                             // the exchange has failed
  PlanFault fault;
};

// Lays out the state and the arrays behind it: stores their offsets in `call`, returns the bytes of all. Each
// translation unit has its own, because narrow and wide kernels differ.
[[maybe_unused]] static std::int64_t lay_out_block(DispatchArguments* call) {
  const LaneView& lane = call->lane;
  BlockOffsets& at = call->shared;
  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t begin = end;
    end = (end + bytes + 15) / 16 * 16;
    return static_cast<std::int32_t>(begin);
  };
  const std::int64_t ranks = lane.ranks, experts = lane.experts, groups = lane.groups;
  take(sizeof(DispatchBlockState));
  at.tables = take(RoutingTables::bytes(lane.experts, lane.ranks));
  std::byte* const zero = nullptr;
  const RoutingTables tables = RoutingTables::at(zero + at.tables, lane.experts, lane.ranks);
  const auto offset = [&](const auto* array) {
    return static_cast<std::int32_t>(reinterpret_cast<const std::byte*>(array) - zero);
  };
  at.capacity = offset(tables.capacity);
  at.first_physical = offset(tables.first_physical);
  at.physical_of = offset(tables.physical_of);
  at.expert_of = offset(tables.expert_of);
  at.rank_of = offset(tables.rank_of);
  at.own_first_row = take(4 * std::max(experts, ranks));
  at.first_row = take(4 * (lane.layout == Layout::rank_major ? ranks : groups * ranks));
  at.group_begin = take(4 * (groups + 1));
  at.group_count = take(4 * (groups + 1));
  at.messages = take(4 * ranks * (kWide ? 1 : ranks));
  at.aligned_before = take(4 * experts);
  constexpr std::int64_t kStream = RowStream<InputRowIterator>::kBytes;
  // Streams begin at a multiple of kLine: asynchronous loads to other addresses take longer.
  end = (end + kLine - 1) / kLine * kLine;
  at.streams = take(kWorkWarps * kStream);
  // The counts share their memory with the last warp's stream. That warp receives, but does not send; when it
  // receives, no warp counts any more.
  at.route_counts = take(std::max(kStream, RouteCounts::bytes(lane.signals)));
  return end;
}

__device__ __forceinline__ DispatchBlockState* block_state() {
  return reinterpret_cast<DispatchBlockState*>(block_memory);
}
// The memory of this warp's stream.
__device__ __forceinline__ std::byte* stream_of(const DispatchArguments& call) {
  return block_memory + call.shared.streams + threadIdx.x / 32 * RowStream<InputRowIterator>::kBytes;
}
__device__ __forceinline__ RouteCounts route_counts_of(const DispatchArguments& call) {
  return {reinterpret_cast<std::int32_t*>(block_memory + call.shared.route_counts),
          2 * call.lane.signals.count_words};
}

// [thread] N of a call from ids. A token count that is known on the device only is checked here: one out of
// range counts as 0, and aborts the call if `reports`.
__device__ inline std::int64_t token_count(const DispatchArguments& call, bool reports) {
  if (call.device_tokens == nullptr) return call.tokens;
  const std::int64_t tokens = *call.device_tokens;
  const std::int64_t most = min(call.tokens, std::int64_t{call.lane.max_tokens});
  if (tokens >= 0 && tokens <= most) return tokens;
  if (reports)
    abort_call(call.lane, call.lane.state->calls[blockIdx.x] + 1, Operation::dispatch,
               DeviceError::Reason::too_many, call.lane.rank, 0, tokens, most);
  return 0;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
