// A dispatch block's state in shared memory, the layout of that memory, and the work of its warps: sending
// from ids or from a plan, receiving, writing padding rows.
#pragma once

#include <algorithm>

#include "backends/cuda/dispatch/dispatch_receive.cuh"
#include "backends/cuda/dispatch/send_by_plan.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "layout/plan_layout.hpp"

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

__device__ __forceinline__ SendContext send_context_of(const DispatchArguments& call, bool has_row_offsets) {
  DispatchBlockState* const state = block_state();
  return {.call = call,
          .tables = BlockTables::of(call),
          .offsets = RowOffsets::of(call),
          .has_row_offsets = has_row_offsets,
          .direct_write_peers = has_row_offsets ? state->direct_write_peers : 0,
          .publisher = &state->publisher,
          .number = state->number};
}

// A stream of the rows that worker `worker` sends, in the order in which it sends them.
template <class Traits>
__device__ __forceinline__ RowStream<InputRowIterator> input_rows(const DispatchArguments& call, int worker) {
  const SendPartition partition = block_state()->partition;
  return {stream_of(call),
          InputRowIterator::of<Traits>(call, partition.log2_segments, partition.token_begin(worker),
                                       partition.token_end(worker))};
}

// [warp] Sends all segments of worker `worker`, from ids; input_rows() has been started. `first`: the inputs
// of its first tokens.
template <class Traits>
__device__ __forceinline__ void send_tokens(const DispatchArguments& call, int worker, bool has_row_offsets,
                                            const InputSlot& first) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const SendContext context = send_context_of(call, has_row_offsets);
  RowStream<InputRowIterator> rows = input_rows<Traits>(call, worker);
  rows.resume();
  if constexpr (Traits::kFewTokens) {
    DestinationPlanner<Traits> planner{context, first};
    TokenSender<Traits>(context).send_segments(block_state()->partition, worker, planner, rows);
  } else {
    RoutePlanner<Traits> planner{context, route_counts_of(call).of_warp(warp), first};
    TokenSender<Traits>(context).send_segments(block_state()->partition, worker, planner, rows);
  }
}

// [warp] Sends tokens by a plan.
template <class Traits>
__device__ __forceinline__ void send_by_plan(const DispatchArguments& call, int worker,
                                             bool has_row_offsets) {
  const SendContext context = send_context_of(call, has_row_offsets);
  const SendPartition partition = block_state()->partition;
  RowStream<InputRowIterator> rows = input_rows<Traits>(call, worker);
  rows.start();
  PlanReader<Traits> reader(context, sending_tile<Traits>(call.lane), partition.token_begin(worker),
                            partition.token_end(worker),
                            route_counts_of(call).of_warp(static_cast<int>(threadIdx.x / 32)));
  TokenSender<Traits>(context).send_segments(partition, worker, reader, rows);
}
// For kernels that send from ids as well: not inlined, because its registers would make the other path spill.
template <class Traits>
static __device__ __noinline__ void send_by_generic_plan(const DispatchArguments& call, int worker,
                                                         bool has_row_offsets) {
  send_by_plan<Traits>(call, worker, has_row_offsets);
}

// [warp] Receives all segments of worker `worker` of `workers`. Returns false if the call was aborted.
template <class Traits>
__device__ __forceinline__ bool receive_tokens(const DispatchArguments& call, int worker, int workers) {
  DispatchBlockState* const state = block_state();
  const Receiver<Traits> receiver{.call = call,
                                  .context = {.call = call,
                                              .tables = BlockTables::of(call),
                                              .offsets = RowOffsets::of(call),
                                              .queue = {.call = call,
                                                        .offsets = RowOffsets::of(call),
                                                        .sender_warps = state->sender_warps,
                                                        .indexed_tokens = state->indexed_tokens,
                                                        .number = state->number},
                                              .direct_writers = state->direct_writers,
                                              .segments = state->segments,
                                              .memory = stream_of(call)}};
  return receiver.receive_all(worker, workers);
}

// The padding rows after a group's last row.
struct PaddingRows {
  std::int64_t begin, end;

  __device__ static PaddingRows of(const LaneView& lane, const RowOffsets& offsets, int group) {
    const std::int64_t first = offsets.group_begin[group], count = offsets.group_count[group];
    const std::int64_t aligned =
        min(std::int64_t{lane.by_alignment.round_up(static_cast<std::int32_t>(count))}, lane.capacity);
    return {first + count, lane.layout == Layout::expert_padded
                               ? first + aligned
                               : min(std::int64_t{offsets.group_begin[group + 1]}, lane.capacity)};
  }
};

// [warp] Writes the plan's and the result's entries of padding rows, and zeroes the rows if the exchange does
// so.
__device__ inline void write_padding_rows(const DispatchArguments& call, const PaddingRows& rows,
                                          const PlanView& plan) {
  const int thread = threadIdx.x % 32;
  for (std::int64_t row = rows.begin + thread; row < rows.end; row += 32) {
    plan.sources[row] = Source{};
    if (call.weight != nullptr) call.weight[row] = 0;
    if (call.dots != nullptr) call.dots[row] = 0;
    if (call.group_of_row != nullptr) call.group_of_row[row] = -1;
  }
  if (!call.lane.zero_padding) return;
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    for (int p = 0; p < call.received.count; ++p) {
      const PartLayout& part = call.received.part[p];
      const std::int64_t leading = call.leading_dimension[p],
                         to = column_row(part, row, call.group_rows, leading);
      for (std::int64_t byte = 4 * thread; byte < part.row_bytes; byte += 128) {
        const std::int64_t element = byte / part.element_bytes;
        *reinterpret_cast<std::uint32_t*>(
            call.received_parts[p] + element_offset(part, to, element, leading) + byte % part.element_bytes) =
            0;
      }
    }
  }
}

// [warp] Writes the padding of every group that falls to warp `worker` of `workers`. Few groups have any, so
// each thread looks at a group of its own first.
static __device__ __noinline__ void write_padding(const DispatchArguments& call, const RowOffsets& offsets,
                                                  int worker, int workers, const PlanView& plan) {
  const LaneView& lane = call.lane;
  if (lane.layout == Layout::rank_major) return;
  for (int first = worker; first < lane.groups; first += 32 * workers) {
    const int mine = first + static_cast<int>(threadIdx.x % 32) * workers;
    bool some = false;
    if (mine < lane.groups) {
      const PaddingRows rows = PaddingRows::of(lane, offsets, mine);
      some = rows.begin < rows.end;
    }
    for (std::uint32_t left = __ballot_sync(~0u, some); left != 0; left &= left - 1) {
      const int group = first + (__ffs(static_cast<int>(left)) - 1) * workers;
      write_padding_rows(call, PaddingRows::of(lane, offsets, group), plan);
    }
  }
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
