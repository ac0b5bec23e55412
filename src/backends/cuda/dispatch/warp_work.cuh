// The work of one warp in each of its roles, from the block's state: sending from ids or from a plan, and
// receiving.
#pragma once

#include "backends/cuda/dispatch/block_state.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

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

}  // namespace ferry::cuda::inline FERRY_WIDTH
