// Dispatch and combine in the call shapes of nvFuser: combine needs no plan and no ids. In device memory x,
// ids, rows and results are addresses there; the arrays of integers are the host's. See ferry/nvfuser.hpp and
// docs/guides/nvfuser.md.
#ifndef FERRY_C_NVFUSER_H
#define FERRY_C_NVFUSER_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"
#include "ferry/c/exchange.h"
#include "ferry/c/operations.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An exchange with the calls below. Ranks make the same calls in the same order, one at a time; each returns
/// when this rank's result is complete.
typedef struct ferry_nvfuser_exchange ferry_nvfuser_exchange;

/// Collective. Uses experts, top_k, hidden, max_tokens, backend, engine, memory, hops, window, the placement,
/// deadline and format of `config`; the format, FERRY_FORMAT_BF16, FP16 or FP32, is the type of tokens, rows
/// and results. FERRY_USAGE: any other field that is set. FERRY_UNSUPPORTED: experts in slices.
ferry_status ferry_nvfuser_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                           ferry_nvfuser_exchange** exchange);
/// Local. NULL is allowed.
void ferry_nvfuser_exchange_destroy(ferry_nvfuser_exchange* exchange);

/// The most rows that a dispatch gives this rank.
int64_t ferry_nvfuser_capacity(const ferry_nvfuser_exchange* exchange);

/// What a rank has received. The arrays belong to the exchange, whose next dispatch overwrites them. With K =
/// 1 rows are sorted by local expert, source rank, token. With K > 1 there is one row for each (token, rank),
/// sorted by source rank, token.
typedef struct ferry_nvfuser_dispatch_result {
  size_t size;
  const void* recv_x;                 ///< [rows, H], dense; the memory passed as recv_x, if any
  const int64_t* recv_topk_idx;       ///< K = 1: [rows] global expert ids; else [rows, K] local or -1
  const int64_t* recv_src_idx;        ///< [rows] index of the row's token on its source rank
  const int64_t* recv_src_rank;       ///< [rows]
  const int64_t* n_tokens_to_rank;    ///< [R] rows that this rank has sent to each rank
  const int64_t* n_tokens_from_rank;  ///< [R] rows that this rank has received from each rank
  int64_t rows;
} ferry_nvfuser_dispatch_result;

typedef struct ferry_nvfuser_dispatch_args {
  size_t size;
  ferry_tokens tokens;
  const void* ids;                        ///< [N, K] expert ids, dense; -1 masks a slot
  int32_t id_type;                        ///< FERRY_INT32, FERRY_INT64
  ferry_nvfuser_dispatch_result* result;  ///< also filled when ids out of range are reported
  void* recv_x;  ///< [capacity, H], aligned to 16 bytes: takes the rows; NULL: the exchange's memory
  void* stream;  ///< device memory: a cudaStream_t; the work waits for what is on it
} ferry_nvfuser_dispatch_args;

/// Sends every token to the ranks of its experts.
ferry_status ferry_nvfuser_dispatch(ferry_nvfuser_exchange* exchange,
                                    const ferry_nvfuser_dispatch_args* args);

typedef struct ferry_nvfuser_combine_args {
  size_t size;
  const void* rows;   ///< [row_count, H] outputs in the order of recv_x, dense, aligned to 16 bytes;
                      ///< with K > 1 the sum over this rank's experts
  int64_t row_count;  ///< `rows` of the dispatch's result
  const int64_t* recv_src_idx;        ///< [row_count] of the dispatch's result, as the next three
  const int64_t* recv_src_rank;       ///< [row_count]
  const int64_t* n_tokens_to_rank;    ///< [R]
  const int64_t* n_tokens_from_rank;  ///< [R]
  int64_t tokens;                     ///< N of the dispatch
  void* result;  ///< [N, H], dense, of the exchange's type; in device memory aligned to 16 bytes
  void* stream;  ///< as of dispatch
} ferry_nvfuser_combine_args;

/// Writes each token's rows added in fp32 from +0 in rank order and rounded once; zeros for a token without
/// rows.
ferry_status ferry_nvfuser_combine(ferry_nvfuser_exchange* exchange, const ferry_nvfuser_combine_args* args);

#ifdef __cplusplus
}
#endif

#endif
