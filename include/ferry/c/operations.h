// Dispatch and combine: the two all-to-all steps of a Mixture-of-Experts layer, and their gradients.
//
// Collective: every rank issues the same operations on a lane in the same order.
//
// Blocking: host backends run in the calling thread and return when the operation is done. Device backends
// enqueue on the call's stream and return.
//
// Statuses: FERRY_USAGE for arguments that are refused, FERRY_TIMEOUT, FERRY_PEER_LOST. A call of a host
// backend that was carried out returns what ferry_check() finds, unless manual_check is set.
#ifndef FERRY_C_OPERATIONS_H
#define FERRY_C_OPERATIONS_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"
#include "ferry/c/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Arguments of a dispatch. All ranks pass the same format, apply_weights and `weighted`.
typedef struct ferry_dispatch_args {
  size_t size;
  ferry_call_options call;
  ferry_tokens tokens;
  const void* ids;  ///< [N, K] expert ids, dense; -1 masks a slot; an expert may be listed more than once
  ferry_plan plan;  ///< instead of ids: the routes of an earlier dispatch. N = 0 needs neither
  const float* weights;   ///< [N, K], given by all ranks, or NULL on all: see `weighted`
  int32_t id_type;        ///< FERRY_INT32, FERRY_INT64
  int32_t apply_weights;  ///< 1: multiplies received values by their weight; not with formats that quantise,
                          ///< raw, rank_major
  /// 1: the dispatch carries weights, though this rank has no tokens and `weights` is NULL. Weights that are
  /// not NULL and apply_weights say so, too. It decides whether ferry_dispatch_result.weight is NULL.
  int32_t weighted;
  ferry_format format;  ///< default: the configuration's
  ferry_receive_buffers memory;
  /// Rows v, [total, H] of the configuration's combine_type, dense: dots[row] = dot(x, v[row]), with x the
  /// row before it is multiplied by its weight. Not with formats that quantise, raw, rank_major. Must not lie
  /// in the memory of the received rows.
  const void* dot_rows;
  /// FERRY_FORMAT_NVFP4 without FERRY_NVFP4_PER_TOKEN: address of g, one fp32, read while the call runs;
  /// NULL: 1. See ferry::DispatchOptions::global_scale.
  const float* global_scale;
  /// [E + S] a scale of each expert, with which rows are encoded where they arrive; NULL: none. See
  /// ferry::DispatchOptions::input_scales.
  const float* input_scales;
  int64_t input_scale_count;  ///< length of input_scales: E + S
  /// May be NULL. Filled also when the call returns what ferry_check() found; zeroed on other errors.
  ferry_dispatch_result* result;
  int64_t layer;  ///< see ferry::DispatchOptions::layer; default 0
} ferry_dispatch_args;

/// Sends every token to the ranks that hold its experts, and returns the rows that this rank receives,
/// arranged by the configuration's layout.
ferry_status ferry_dispatch(ferry_exchange* exchange, const ferry_dispatch_args* args);
/// The send phase of a dispatch. Waits for no peer's data and does not use `result`. When it is done, tokens,
/// ids and weights may be reused. Between the phases, the lane accepts only ferry_dispatch_receive(), from
/// any thread.
ferry_status ferry_dispatch_send(ferry_exchange* exchange, const ferry_dispatch_args* args);
/// The receive phase of the lane's dispatch. `result`: as in ferry_dispatch_args. `call`, here and below:
/// NULL for zeros.
ferry_status ferry_dispatch_receive(ferry_exchange* exchange, const ferry_call_options* call,
                                    ferry_dispatch_result* result);

/// What combine does with each value of the result: see ferry::Epilogue.
typedef struct ferry_epilogue {
  size_t size;
  /// [N, H] of the result's type, or NULL: nothing is added. It may be the result itself.
  const void* residual;
  int64_t stride;  ///< bytes from one residual row to the next; 0: dense
  double scale;    ///< rounded to fp32; 0: 1
} ferry_epilogue;

/// Arguments of a combine. Without row_weights and topk_weights, every weight is 1.
typedef struct ferry_combine_args {
  size_t size;
  ferry_call_options call;
  ferry_rows outputs;  ///< [total, H]; converted to the configuration's combine_type where the type differs
  ferry_rows result;   ///< [N, H]; unreduced: [N, K, H]
  ferry_plan plan;     ///< of the dispatch whose rows `outputs` correspond to
  const float* row_weights;  ///< [total] weights of the rows, such as ferry_dispatch_result.weight
  const float*
      topk_weights;  ///< [N, K] weights of this rank's slots, instead of row_weights: see topk_weighted
  /// 1: the combine takes topk_weights, though this rank has no tokens and topk_weights is NULL. A pointer
  /// that is not NULL says so, too.
  int32_t topk_weighted;
  int32_t reduction;        ///< FERRY_PARTIAL, ...; default: the configuration's
  const float* row_values;  ///< [total] one fp32 of each row, returned to its source rank ...
  float* route_values;      ///< ... as [N, K]; 0 where the slot is masked or was dropped
  /// [S, N, H] of the result's type, dense, or NULL: takes the outputs of the shared experts, which are then
  /// not added. Needed by FERRY_UNREDUCED.
  void* shared_outputs;
  const ferry_epilogue* epilogue;  ///< or NULL; read by the call, its residual in the receive phase
} ferry_combine_args;

/// Returns the experts' outputs to their source ranks and adds the rows of each token. FERRY_PARTIAL sends
/// topk_weights to the experts' ranks first: then either all ranks pass them, ranks without tokens too, or
/// none.
ferry_status ferry_combine(ferry_exchange* exchange, const ferry_combine_args* args);
/// The send phase of a combine. The plan, the result, shared_outputs and topk_weights must live until the
/// receive phase is done. topk_weights with FERRY_PARTIAL are refused.
ferry_status ferry_combine_send(ferry_exchange* exchange, const ferry_combine_args* args);
/// The receive phase of the lane's combine.
ferry_status ferry_combine_receive(ferry_exchange* exchange, const ferry_call_options* call);

typedef struct ferry_combine_backward_args {
  size_t size;
  ferry_call_options call;
  ferry_tokens d_result;  ///< dy, [N, H]
  ferry_plan plan;
  const float* topk_weights;  ///< [N, K]
  /// The rows v that combine was given, [total, H] of its combine_type, dense. Not in the memory of the
  /// received rows, which this call writes.
  const void* outputs;
  int64_t output_rows;  ///< as ferry_rows.rows
  float* d_weights;     ///< [N, K]: dot(dy[token], v) with v the slot's row
  ferry_format format;
  ferry_receive_buffers memory;
  ferry_dispatch_result* result;  ///< rows of dy multiplied by their weights; as in ferry_dispatch_args
} ferry_combine_backward_args;

/// The gradients of combine, given the gradient dy of its result: see ferry::Exchange::combine_backward.
ferry_status ferry_combine_backward(ferry_exchange* exchange, const ferry_combine_backward_args* args);

typedef struct ferry_route_values_args {
  size_t size;
  ferry_call_options call;
  const float* values;  ///< [N, K]
  ferry_plan plan;
  float* row_values;  ///< [total]; 0 on padding
} ferry_route_values_args;

/// Sends one fp32 of each route to the route's row.
ferry_status ferry_route_values(ferry_exchange* exchange, const ferry_route_values_args* args);

typedef struct ferry_return_values_args {
  size_t size;
  ferry_call_options call;
  const float* row_values;  ///< [total]
  ferry_plan plan;
  float* route_values;  ///< [N, K]; 0 where the slot is masked or was dropped
} ferry_return_values_args;

/// Returns one fp32 of each row to the row's source rank.
ferry_status ferry_return_values(ferry_exchange* exchange, const ferry_return_values_args* args);

/// Sum, prefix sum and maximum of the ranks' counts.
typedef struct ferry_step_metadata {
  int32_t sum;
  int32_t prefix;  ///< sum over the ranks before this one
  int32_t maximum;
} ferry_step_metadata;

typedef struct ferry_metadata_args {
  size_t size;
  ferry_call_options call;
  int32_t count;                         ///< of this rank, 0 or more
  const ferry_step_metadata** metadata;  ///< receives `into`, or a fixed address of the lane
  /// Device backends: address of the count in device memory, read when the call runs, instead of `count`.
  const int32_t* device_count;
  ferry_step_metadata* into;  ///< see ferry::Exchange::metadata; may be null
} ferry_metadata_args;

/// Computes sum, prefix sum and maximum of the ranks' counts.
ferry_status ferry_metadata(ferry_exchange* exchange, const ferry_metadata_args* args);

typedef struct ferry_all_gather_v_args {
  size_t size;
  ferry_call_options call;
  const void* rows;   ///< [count, row_bytes], dense; may be NULL if count is 0
  int64_t count;      ///< rows of this rank
  int64_t row_bytes;  ///< the same on all ranks
  /// Takes [the sum of all counts, row_bytes]. `rows` may be this rank's rows in it.
  void* gathered;
  int64_t capacity;  ///< rows that `gathered` has room for; rows past the sum are not written
  const int32_t*
      device_count;  ///< given: the number of rows, 0 to `count`, is read from here when the call runs
} ferry_all_gather_v_args;

/// Copies the rows of all ranks to every rank, in rank order. FERRY_USAGE on every rank, with nothing
/// written: `gathered` is too small on a rank. FERRY_UNSUPPORTED: the backend is FERRY_CUDA in two hops or
/// FERRY_NVSHMEM on several nodes, or device_count is given to a host backend.
ferry_status ferry_all_gather_v(ferry_exchange* exchange, const ferry_all_gather_v_args* args);

typedef struct ferry_reduce_scatter_v_args {
  size_t size;
  ferry_call_options call;
  const void* rows;  ///< [total, H] of `type`, dense; the first counts[0] rows belong to rank 0, and so on
  int64_t total;     ///< the sum of all ranks' counts
  void* sums;        ///< takes [count, H] of `type`, dense: this rank's rows. They may be those of `rows`
  int64_t count;     ///< rows of this rank
  int32_t type;      ///< value type
  const int32_t* device_count;  ///< as in ferry_all_gather_v_args; `total` may then be larger than the sum
} ferry_reduce_scatter_v_args;

/// Adds what the ranks hold for each row, in fp32, in rank order from +0, rounded once to `type`, and gives
/// every rank its own rows of the sum. FERRY_USAGE on every rank, with nothing written: `total` is not the
/// sum of the counts on a rank. FERRY_UNSUPPORTED: as ferry_all_gather_v().
ferry_status ferry_reduce_scatter_v(ferry_exchange* exchange, const ferry_reduce_scatter_v_args* args);

/// What a dispatch of some ids delivers to this rank. The arrays belong to the lane, whose next
/// ferry_dispatch_counts() overwrites them; they are in host memory with every backend.
typedef struct ferry_dispatch_counts_result {
  size_t size;
  int64_t total;          ///< row_offsets[G] of the dispatch
  const int32_t* routes;  ///< [L] routes of all ranks to each local expert, drops included; [local_slots]
                          ///< where ferry_config has them, 0 from L on
  const int32_t* tokens;  ///< [R] N of every rank
  int64_t local_experts;  ///< entries of `routes`
  int64_t ranks;          ///< R
} ferry_dispatch_counts_result;

typedef struct ferry_dispatch_counts_args {
  size_t size;
  ferry_call_options call;
  const void* ids;  ///< [tokens, K] expert ids, as for ferry_dispatch()
  int64_t tokens;   ///< N
  int32_t id_type;  ///< FERRY_INT32, FERRY_INT64
  ferry_dispatch_counts_result* result;
} ferry_dispatch_counts_args;

/// Counts what a dispatch of these ids would deliver, without sending rows: for receive buffers of exactly as
/// many rows as the dispatch that follows needs. Blocks with every backend until all ranks have called it.
ferry_status ferry_dispatch_counts(ferry_exchange* exchange, const ferry_dispatch_counts_args* args);

/// Takes part in the lane's next call, an `operation` such as FERRY_DISPATCH, by refusing it: the peers' call
/// returns FERRY_USAGE with `reason` in its message. For code that finds out that it cannot make the call.
ferry_status ferry_refuse(ferry_exchange* exchange, int operation, const char* reason,
                          const ferry_call_options* call);

/// Local. Device backends: blocks until the work on the stream is done, then returns the error that ended a
/// call of the lane on the device. Host backends have returned it already: no effect.
ferry_status ferry_synchronize(ferry_exchange* exchange, const ferry_call_options* call);

/// Local. Returns what the lane's calls since the last check have found: FERRY_OVERFLOW, FERRY_USAGE with a
/// bad_id or bad_source record, or FERRY_OK. Those calls were carried out all the same.
ferry_status ferry_check(ferry_exchange* exchange, int lane);
/// Local. The result of the lane's last dispatch.
ferry_status ferry_last_dispatch_result(const ferry_exchange* exchange, int lane,
                                        ferry_dispatch_result* result);

/// What an exchange has counted so far: see ferry::LoadCounts, ferry::WireCounts and ferry::WaitTimes.
typedef struct ferry_counts {
  size_t size;
  // Routes of dispatches from ids, on all lanes: the same on every rank. The arrays are valid until this
  // thread's next ferry_exchange_counts().
  const int64_t* experts;  ///< [E] routes to each expert
  const int64_t* ranks;    ///< [R] routes to each rank
  int64_t dispatches;
  // What this rank has sent to other ranks.
  int64_t dispatch_bytes, dispatch_messages;
  int64_t combine_bytes, combine_messages;
  // The part of these that went to ranks of other nodes. 0 with FERRY_CUDA in one hop.
  int64_t dispatch_bytes_between_nodes, dispatch_messages_between_nodes;
  int64_t combine_bytes_between_nodes, combine_messages_between_nodes;
  const int64_t* layers;  ///< [layers, E] routes to each expert, by layer; valid as `experts`
  // Nanoseconds [R] that this rank has waited for each peer; valid as `experts`. 0 without count_waits.
  const int64_t* dispatch_waits;  ///< in dispatches, and in all other calls that combine_waits lacks
  const int64_t* combine_waits;   ///< in combine, return_values and reduce_scatter_v
} ferry_counts;

/// Local.
ferry_status ferry_exchange_counts(const ferry_exchange* exchange, ferry_counts* counts);

#ifdef __cplusplus
}
#endif

#endif
