// Dispatch and combine.
//
// Collective: every rank calls the same operations of a lane in the same order. Host backends work in the
// calling thread and return when the operation is done. Apart from refusals (FERRY_USAGE), FERRY_TIMEOUT and
// FERRY_PEER_LOST, a call ends with what ferry_check finds, unless check_apart is set; then it has been
// carried out all the same.
#ifndef FERRY_C_OPERATIONS_H
#define FERRY_C_OPERATIONS_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"
#include "ferry/c/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ferry_dispatch_args {
  size_t size;
  ferry_tokens tokens;
  const void* ids;        // [count, top_k], dense: -1 masks a slot, an expert may stand twice ...
  ferry_plan plan;        // ... or the routes of a plan again; exactly one of both, none with no tokens
  const float* weights;   // [count, top_k] or NULL
  int32_t id_type;        // FERRY_INT32, FERRY_INT64
  int32_t apply_weights;  // 1: values arrive multiplied by their weight; not with fp8, raw, rank_major
  ferry_format format;    // default: the configuration's
  ferry_receive_buffers memory;
  const void* dot_rows;  // rows v [total, hidden] of type `wire`: dots[row] = dot(x before weighing, v)
  int32_t lane;
  int32_t sm_limit;  // GPU backends: most blocks at once; 0: no limit
  void* stream;      // of the backend; host backends take none
  // May be NULL. Filled, also when the call ends with what ferry_check finds; zero after other errors.
  ferry_dispatch_result* result;
} ferry_dispatch_args;

typedef struct ferry_dispatch_receive_args {
  size_t size;
  int32_t lane;
  void* stream;
  ferry_dispatch_result* result;  // as in ferry_dispatch_args
} ferry_dispatch_receive_args;

// Sends every token to the ranks of its experts and lays the arrivals out. The split form: the send half
// waits for no peer's data and leaves `arrivals` alone; tokens, ids and weights may be reused after it; the
// receive half may run in another thread; the lane takes nothing else in between.
ferry_status ferry_dispatch(ferry_exchange* exchange, const ferry_dispatch_args* args);
ferry_status ferry_dispatch_send(ferry_exchange* exchange, const ferry_dispatch_args* args);
ferry_status ferry_dispatch_receive(ferry_exchange* exchange, const ferry_dispatch_receive_args* args);

typedef struct ferry_combine_args {
  size_t size;
  ferry_rows outputs;  // [total, hidden]; rounded to `wire` where the type differs
  ferry_rows result;   // [tokens, hidden]; unreduced [tokens, top_k, hidden]; both empty: only route_values
  ferry_plan plan;
  const float* row_weights;   // that travelled: ferry_dispatch_result.weight, one a row ...
  const float* topk_weights;  // ... or [tokens, top_k] at home; neither: every weight is 1
  const float* row_values;    // one fp32 a row that comes home ...
  float* route_values;        // ... as [tokens, top_k], 0 where masked or dropped
  int32_t lane, sm_limit;
  int32_t reduction;  // FERRY_PARTIAL, ...; default: the configuration's
  void* stream;
} ferry_combine_args;

typedef struct ferry_combine_receive_args {
  size_t size;
  int32_t lane;
  void* stream;
} ferry_combine_receive_args;

// Brings the experts' outputs home and adds them. Home weights with partial: not NULL on any rank, also
// without tokens, because they take a call of their own. Split form: plan, result and home weights must live
// until the receive half has ended, and home weights with partial are refused.
ferry_status ferry_combine(ferry_exchange* exchange, const ferry_combine_args* args);
ferry_status ferry_combine_send(ferry_exchange* exchange, const ferry_combine_args* args);
ferry_status ferry_combine_receive(ferry_exchange* exchange, const ferry_combine_receive_args* args);

typedef struct ferry_combine_backward_args {
  size_t size;
  ferry_tokens d_result;  // dy [tokens, hidden]
  ferry_plan plan;
  const float* topk_weights;  // [tokens, top_k]
  const void* outputs;        // rows v that combine was given [total, hidden], type `wire`, dense
  float* d_weights;           // [tokens, top_k]: dot(dy, v)
  ferry_format format;
  ferry_receive_buffers memory;
  int32_t lane, sm_limit;
  void* stream;
  ferry_dispatch_result* result;  // rows of dy times their weight; as in ferry_dispatch_args
} ferry_combine_backward_args;

// Gradients of combine.
ferry_status ferry_combine_backward(ferry_exchange* exchange, const ferry_combine_backward_args* args);

typedef struct ferry_route_values_args {
  size_t size;
  const float* values;  // [tokens, top_k]
  ferry_plan plan;
  float* row_values;  // [total], padding 0
  int32_t lane;
  void* stream;
} ferry_route_values_args;

// Carries one fp32 a route to its row.
ferry_status ferry_route_values(ferry_exchange* exchange, const ferry_route_values_args* args);

typedef struct ferry_step_metadata {
  int32_t sum, prefix, maximum;  // of every rank's count; prefix: of the ranks before this one
} ferry_step_metadata;

typedef struct ferry_metadata_args {
  size_t size;
  int32_t count;  // 0 or more
  int32_t lane;
  void* stream;
  const ferry_step_metadata** metadata;  // becomes a fixed address of the lane
} ferry_metadata_args;

// [sum, prefix before me, maximum] of the ranks' counts.
ferry_status ferry_metadata(ferry_exchange* exchange, const ferry_metadata_args* args);

// What the lane's calls since the last check have found: FERRY_USAGE with a bad_id or bad_source record,
// FERRY_OVERFLOW, or FERRY_OK. Local.
ferry_status ferry_check(ferry_exchange* exchange, int lane);
// The arrivals of the lane's last dispatch. Local.
ferry_status ferry_last_dispatch_result(const ferry_exchange* exchange, int lane,
                                        ferry_dispatch_result* result);

typedef struct ferry_load_counts {  // seen so far by this exchange on all lanes, the same on every rank
  size_t size;
  const int64_t* experts;  // [E] routes to every expert; until the exchange's next ferry_load
  const int64_t* ranks;    // [R] routes to every rank
  int64_t dispatches;
} ferry_load_counts;

typedef struct ferry_wire_counts {  // what this rank has written to other ranks' memory
  size_t size;
  int64_t dispatch_bytes, dispatch_messages;
  int64_t combine_bytes, combine_messages;
} ferry_wire_counts;

ferry_status ferry_load(const ferry_exchange* exchange, ferry_load_counts* counts);
ferry_status ferry_get_wire_counts(const ferry_exchange* exchange, ferry_wire_counts* counts);

#ifdef __cplusplus
}
#endif

#endif
