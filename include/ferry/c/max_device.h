// The call shapes of ferry/c/max.h on device memory: every array is device memory that kernels on the
// caller's stream read and write, so nothing waits on the host and a call can be captured into a CUDA graph.
// See ferry/max_device.hpp and docs/guides/max.md.
#ifndef FERRY_C_MAX_DEVICE_H
#define FERRY_C_MAX_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"
#include "ferry/c/exchange.h"
#include "ferry/c/operations.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An exchange with the calls below. They are enqueued on `stream` and return.
typedef struct ferry_max_device_exchange ferry_max_device_exchange;

/// Collective. As ferry_max_exchange_create(). FERRY_UNSUPPORTED: host memory.
ferry_status ferry_max_device_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                              ferry_max_device_exchange** exchange);
/// Local. NULL is allowed.
void ferry_max_device_exchange_destroy(ferry_max_device_exchange* exchange);

/// What a rank has received: memory of the lane, whose next dispatch overwrites it. The arrays have the
/// lengths that they can need; `number`, of groups with rows, is expert_usage_stats[1].
typedef struct ferry_max_device_dispatch_result {
  size_t size;
  const void* output_tokens;                   ///< [capacity, H] values: parts[0].data
  ferry_received_part parts[FERRY_MAX_PARTS];  ///< all parts, as in ferry_dispatch_result
  const uint32_t* row_offsets;                 ///< [groups + 1]; from entry `number` on the number of rows
  const int32_t* expert_ids;                   ///< [groups]; -1 from entry `number` on
  const uint32_t* expert_usage_stats;          ///< [2] the most rows of a group, and `number`
  const int32_t* src_info;      ///< [capacity, 2]; rows past the number of rows are not written
  const int32_t* counts;        ///< [groups, R] rows of each group from each source rank
  int64_t capacity;             ///< rows
  int64_t groups;               ///< G: the shared experts, then this rank's experts
  int64_t ranks;                ///< R
  const int32_t* tile_offsets;  ///< [groups + 1] as in ferry_dispatch_result
} ferry_max_device_dispatch_result;

/// Arguments of a dispatch.
typedef struct ferry_max_device_dispatch_args {
  size_t size;
  ferry_tokens input_tokens;
  const void* topk_ids;  ///< [N, K] expert ids, dense; -1 masks a slot
  int32_t id_type;       ///< FERRY_INT32, FERRY_INT64
  int32_t lane;
  const int32_t* device_count;  ///< or NULL. Given: N is read from here, and input_tokens.count bounds it
  void* stream;
  ferry_max_device_dispatch_result* result;  ///< may be NULL; not used by the async call
  // How tokens are encoded: see ferry_dispatch_args. All ranks pass the same, in memory that the device can
  // read.
  ferry_format format;        ///< default: the configuration's
  const float* global_scale;  ///< FERRY_FORMAT_NVFP4: address of g; NULL: 1
  const float* input_scales;  ///< [E + S] a scale of each expert, shared experts last; NULL: none
  int64_t input_scale_count;  ///< length of input_scales: E + S
} ferry_max_device_dispatch_args;

typedef struct ferry_max_device_dispatch_wait_args {
  size_t size;
  int32_t lane;
  void* stream;
  ferry_max_device_dispatch_result* result;  ///< may be NULL
} ferry_max_device_dispatch_wait_args;

/// Sends every token to the ranks of its experts, without waiting for theirs.
ferry_status ferry_max_device_ep_dispatch_async(ferry_max_device_exchange* exchange,
                                                const ferry_max_device_dispatch_args* args);
/// Waits, on the stream, for what the ranks have sent.
ferry_status ferry_max_device_ep_dispatch_wait(ferry_max_device_exchange* exchange,
                                               const ferry_max_device_dispatch_wait_args* args);
/// Both.
ferry_status ferry_max_device_ep_fused_dispatch(ferry_max_device_exchange* exchange,
                                                const ferry_max_device_dispatch_args* args);

/// Arguments of a combine. Arrays that are wrong end the call on every rank with a FERRY_USAGE that
/// ferry_max_device_synchronize() returns; the rank whose arrays they are names the numbers.
typedef struct ferry_max_device_combine_args {
  size_t size;
  ferry_rows input_tokens;      ///< [capacity, H] the experts' outputs
  const int32_t* src_info;      ///< of the dispatch's result, as the next two, or copies of them
  const uint32_t* row_offsets;  ///< [groups + 1]
  const int32_t* counts;        ///< [groups, R]
  int32_t own_ids;       ///< 1: topk_ids and tokens are given; 0: they are those of the lane's last dispatch
  int32_t id_type;       ///< FERRY_INT32, FERRY_INT64
  const void* topk_ids;  ///< [tokens, K] the ids of the dispatch
  int64_t tokens;        ///< its N
  ferry_rows output_tokens;        ///< [N, H]; unreduced: [N, K, H]
  const float* router_weights;     ///< [N, K], or NULL: every weight is 1. Not with unreduced
  void* shared_outputs;            ///< [S, N, H] of the result's type, or NULL: they are added
  const ferry_epilogue* epilogue;  ///< or NULL: see ferry_combine_args
  int32_t lane;
  void* stream;
} ferry_max_device_combine_args;

typedef struct ferry_max_device_combine_wait_args {
  size_t size;
  int32_t lane;
  void* stream;
} ferry_max_device_combine_wait_args;

/// Returns every row to the rank, token and slot it came from, without waiting for theirs.
ferry_status ferry_max_device_ep_combine_async(ferry_max_device_exchange* exchange,
                                               const ferry_max_device_combine_args* args);
/// Waits, on the stream, for this rank's rows and adds them.
ferry_status ferry_max_device_ep_combine_wait(ferry_max_device_exchange* exchange,
                                              const ferry_max_device_combine_wait_args* args);
/// Both.
ferry_status ferry_max_device_ep_fused_combine(ferry_max_device_exchange* exchange,
                                               const ferry_max_device_combine_args* args);

/// Local. Waits for the stream and returns the error of a call that has ended with one.
ferry_status ferry_max_device_synchronize(ferry_max_device_exchange* exchange, int lane, void* stream);
/// Local. The same without waiting; also what completed calls have found, such as ids out of range.
ferry_status ferry_max_device_check(ferry_max_device_exchange* exchange, int lane);

#ifdef __cplusplus
}
#endif

#endif
