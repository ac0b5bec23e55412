// Dispatch and combine in the call shapes of MAX's expert-parallel kernels: combine takes src_info,
// row_offsets and counts in place of a plan. The functions are in the library ferry::max. See ferry/max.hpp
// and docs/guides/max.md.
//
// In device memory every array is device memory that kernels on the call's stream read and write: calls are
// enqueued and return, so nothing waits on the host and a call can be captured into a CUDA graph. Arrays that
// are wrong end a combine on every rank with a FERRY_USAGE that ferry_max_synchronize() returns; the rank
// whose arrays they are names the numbers. In host memory the stream is not used.
#ifndef FERRY_C_MAX_H
#define FERRY_C_MAX_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"
#include "ferry/c/exchange.h"
#include "ferry/c/operations.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An exchange with the calls below.
typedef struct ferry_max_exchange ferry_max_exchange;

/// Local. The groups that have rows: counts [2, 0, 3] give row_offsets [0, 2, 5], expert_ids [0, 2] and
/// number 2. Every group begins at a multiple of `alignment`. `row_offsets` has room for groups + 1 entries,
/// `expert_ids` for groups; entries past the number of groups with rows are not written.
ferry_status ferry_max_group_index(const int32_t* counts, int groups, int alignment, uint32_t* row_offsets,
                                   int32_t* expert_ids, int* number);

/// Local. As ferry::max::skip_a2a(): sets `input` and, with shared experts, `shared_split` of the
/// configuration.
ferry_status ferry_max_skip_a2a(ferry_config* config, int allreduce_world_size);

/// Collective. As ferry_exchange_create(). FERRY_USAGE: another layout than FERRY_EXPERT_MAJOR, a capacity,
/// gathered input, external_receive_buffers, in host memory manual_check. FERRY_UNSUPPORTED: experts in
/// slices. The reduction is FERRY_UNREDUCED if the configuration says so, else FERRY_EXACT, with replicated
/// input FERRY_PARTIAL.
ferry_status ferry_max_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                       ferry_max_exchange** exchange);
/// Local. NULL is allowed.
void ferry_max_exchange_destroy(ferry_max_exchange* exchange);

/// What a rank has received: memory of the lane, whose next dispatch overwrites it. `number`, of groups with
/// rows, is expert_usage_stats[1]. In device memory the arrays have the lengths in brackets.
typedef struct ferry_max_dispatch_result {
  size_t size;
  const void* output_tokens;                   ///< [rows, H] values: parts[0].data
  ferry_received_part parts[FERRY_MAX_PARTS];  ///< all parts, as in ferry_dispatch_result
  /// [number + 1] first row of each group with rows, then the number of rows
  /// ([groups + 1], from entry `number` on the number of rows)
  const uint32_t* row_offsets;
  /// [number] those groups, ascending; without shared experts local expert ids
  /// ([groups], -1 from entry `number` on)
  const int32_t* expert_ids;
  /// [rows, 2] {token, slot} at the source rank; {-1, -1} on padding
  /// ([capacity, 2]; rows past the number of rows are not written)
  const int32_t* src_info;
  const int32_t* counts;               ///< [groups, R] rows of each group from each source rank
  const uint32_t* expert_usage_stats;  ///< [2] the most rows of a group, and `number`
  int64_t groups;                      ///< G: the shared experts, then this rank's experts
  int64_t ranks;                       ///< R
  const int32_t* tile_offsets;         ///< [groups + 1] as in ferry_dispatch_result
  int64_t capacity;                    ///< rows that there can be
} ferry_max_dispatch_result;

/// Arguments of a dispatch.
typedef struct ferry_max_dispatch_args {
  size_t size;
  ferry_call_options call;
  ferry_tokens input_tokens;
  const void* topk_ids;               ///< [N, K] expert ids, dense; -1 masks a slot
  int32_t id_type;                    ///< FERRY_INT32, FERRY_INT64
  ferry_max_dispatch_result* result;  ///< may be NULL; not used by the async call
  // How tokens are encoded: see ferry_dispatch_args. All ranks pass the same, in device memory in memory that
  // the device can read.
  ferry_format format;        ///< default: the configuration's
  const float* global_scale;  ///< FERRY_FORMAT_NVFP4: address of g; NULL: 1
  const float* input_scales;  ///< [E + S] a scale of each expert, shared experts last; NULL: none
  int64_t input_scale_count;  ///< length of input_scales: E + S
} ferry_max_dispatch_args;

/// Sends every token to the ranks of its experts, without waiting.
ferry_status ferry_max_ep_dispatch_async(ferry_max_exchange* exchange, const ferry_max_dispatch_args* args);
/// Waits for what the ranks have sent. `result` may be NULL; it is also filled when a finding of
/// ferry_check() is returned. `call`, here and below: NULL for zeros.
ferry_status ferry_max_ep_dispatch_wait(ferry_max_exchange* exchange, const ferry_call_options* call,
                                        ferry_max_dispatch_result* result);
/// Both.
ferry_status ferry_max_ep_fused_dispatch(ferry_max_exchange* exchange, const ferry_max_dispatch_args* args);

/// Arguments of a combine. When the async call returns, the arrays that it reads may be reused, apart from
/// router_weights.
typedef struct ferry_max_combine_args {
  size_t size;
  ferry_call_options call;
  ferry_rows input_tokens;      ///< [rows, H] the experts' outputs
  const int32_t* src_info;      ///< [rows, 2] of the dispatch's result, as the next three, or copies of them
  const uint32_t* row_offsets;  ///< [number + 1]
  const int32_t* counts;        ///< [G, R]
  int32_t number;               ///< groups that have rows; not used in device memory
  int32_t own_ids;       ///< 1: topk_ids and tokens are given; 0: they are those of the lane's last dispatch
  int32_t id_type;       ///< FERRY_INT32, FERRY_INT64
  const void* topk_ids;  ///< [tokens, K] the ids of the dispatch
  int64_t tokens;        ///< its N
  ferry_rows output_tokens;        ///< [N, H]; unreduced: [N, K, H]
  const float* router_weights;     ///< [N, K], or NULL: every weight is 1. Not with unreduced
  void* shared_outputs;            ///< [S, N, H] of the result's type, or NULL: they are added
  const ferry_epilogue* epilogue;  ///< or NULL: see ferry_combine_args
} ferry_max_combine_args;

/// Returns every row to the rank, token and slot it came from, without waiting. Memory for results
/// and router_weights must live until the wait is done.
ferry_status ferry_max_ep_combine_async(ferry_max_exchange* exchange, const ferry_max_combine_args* args);
/// Waits for this rank's rows and adds them.
ferry_status ferry_max_ep_combine_wait(ferry_max_exchange* exchange, const ferry_call_options* call);
/// Both.
ferry_status ferry_max_ep_fused_combine(ferry_max_exchange* exchange, const ferry_max_combine_args* args);

/// Local. Waits for the stream and returns the error of a call that has ended with one.
ferry_status ferry_max_synchronize(ferry_max_exchange* exchange, const ferry_call_options* call);
/// Local. ferry_max_synchronize() without waiting; also returns what completed calls have found, such as ids
/// out of range.
ferry_status ferry_max_check(ferry_max_exchange* exchange, int lane);

#ifdef __cplusplus
}
#endif

#endif
