// The exchange, which owns the buffers of one configuration on one rank, and the arrays of its operations.
#ifndef FERRY_C_EXCHANGE_H
#define FERRY_C_EXCHANGE_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/config.h"
#include "ferry/c/error.h"
#include "ferry/c/group.h"
#include "ferry/c/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/// An exchange. Its operations are in ferry/c/operations.h. Arrays of a call that overlap are FERRY_USAGE on
/// every rank: see ferry::Exchange (ferry/exchange.hpp).
typedef struct ferry_exchange ferry_exchange;

/// Collective. Creates an exchange; blocks until every rank has called. Destroy it before the rank's body
/// returns. FERRY_USAGE: the configuration is wrong on a rank, or differs between ranks. FERRY_SYSTEM: not
/// enough memory.
ferry_status ferry_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                   ferry_exchange** exchange);
/// Local. NULL is allowed.
void ferry_exchange_destroy(ferry_exchange* exchange);

/// The configuration with every default filled in. Its placement arrays belong to the exchange.
ferry_status ferry_exchange_config(const ferry_exchange* exchange, ferry_config* config);
/// The bytes that the exchange takes on this rank, and its capacity.
ferry_status ferry_exchange_sizes(const ferry_exchange* exchange, ferry_sizes* sizes);
/// Where a call runs. All zero: lane 0, the default stream, as many blocks as the lane may have.
typedef struct ferry_call_options {
  int32_t lane;
  int32_t sm_limit;     ///< see ferry::CallOptions
  void* stream;         ///< of a device backend: the call is enqueued on it; host backends use none
  int64_t reserved[2];  ///< 0, see ferry/ferry.h
} ferry_call_options;

/// Rows of this rank's tokens, [N, H]. Row addresses and strides are multiples of 16 bytes.
typedef struct ferry_tokens {
  const void* parts[FERRY_MAX_PARTS];  ///< part 0 holds the values; raw formats use one entry a part
  int64_t strides[FERRY_MAX_PARTS];    ///< bytes from one row to the next; 0: rows are dense
  int64_t count;                       ///< N
  int32_t type;                        ///< value type; not used by raw formats
  /// Device backends: address of N in device memory, read when the call runs; `count` is then an upper bound.
  /// An N that is negative or above the bound sends nothing, and ferry_check() reports it.
  const int32_t* device_count;
  int64_t reserved[2];  ///< 0, see ferry/ferry.h
} ferry_tokens;

/// The experts' outputs, [total, H], which are only read, or the result of combine, [N, H] (unreduced: [N, K,
/// H]).
typedef struct ferry_rows {
  void* data;
  int64_t stride;  ///< bytes from one row to the next (unreduced result: from slot to slot); 0: dense
  int32_t type;    ///< value type
  /// Rows that `data` holds; 0: not said. Outputs: none of them may overlap what the call writes, see
  /// ferry::Outputs. Result: fewer than the call writes are FERRY_USAGE, see ferry::Result.
  int64_t rows;
  int64_t reserved[2];  ///< 0, see ferry/ferry.h
} ferry_rows;

/// Caller's memory for the arrays of a ferry_dispatch_result. Each NULL selects the lane's own memory, which
/// the lane's next dispatch overwrites. "capacity" is in rows (expert_padded: G * capacity).
typedef struct ferry_receive_buffers {
  /// `capacity` rows as in ferry_received_part, aligned to 16 bytes; ceil(capacity / 128) + G rows of tiles.
  void* parts[FERRY_MAX_PARTS];
  float* weight;          ///< [capacity]; rank_major: [capacity, K]
  int32_t* local_ids;     ///< rank_major: [capacity, K]
  int32_t* group_of_row;  ///< [capacity]; the lane has no memory of its own for this array
  void* plan;             ///< ferry_sizes.plan_bytes bytes, aligned to 16
  int32_t* counts;        ///< [G]
  int32_t* row_offsets;   ///< [G + 1]; its last entry is the total
  float* dots;            ///< [capacity], with dot_rows
  int32_t* count_sums;    ///< [G]; the call adds `counts` to it; the lane has none of its own
  /// Rows that the arrays of [capacity] have room for, in a dispatch from ids; 0: the capacity. If more
  /// arrive, those past it are not stored, and every rank gets FERRY_OVERFLOW. ferry_dispatch_counts() tells
  /// them.
  int64_t rows;
  int32_t allow_truncation;  ///< 1: more than `rows` rows on this rank are no error
  int64_t reserved[2];       ///< 0, see ferry/ferry.h
} ferry_receive_buffers;

/// One part of the received rows.
typedef struct ferry_received_part {
  void* data;
  /// Bytes of a row of this part. Scales in columns: of one element. Scales in tiles: of a row of tiles.
  int64_t row_bytes;
  /// Scales in columns: elements from one column to the next; else 0. FERRY_EXPERT_PADDED: each group has
  /// columns of its own, those of group g after those of group g - 1.
  int64_t leading_dimension;
  int64_t reserved[2];  ///< 0, see ferry/ferry.h
} ferry_received_part;

/// The total of a dispatch in host memory: see ferry::HostTotals. Load `call` with acquire; once it is the
/// number of the dispatch, `total` may be read.
typedef struct ferry_host_totals {
  uint64_t call;
  int64_t total;
} ferry_host_totals;

/// The rows that this rank has received, and their sources.
///
/// Groups are the shared experts, then this rank's experts in local order; with rank_major they are the
/// source ranks. The memory belongs to the lane, whose next dispatch overwrites it, or to the caller.
typedef struct ferry_dispatch_result {
  size_t size;
  void* data;                                  ///< the values: parts[0].data
  ferry_received_part parts[FERRY_MAX_PARTS];  ///< formats with scales: values, then scales
  int64_t groups;                              ///< G
  int64_t capacity;                            ///< in rows; expert_padded: rows of one expert
  const int32_t* counts;                       ///< [G] rows of each group, padding excluded
  const int32_t* row_offsets;                  ///< [G + 1] first row of each group
  const int32_t* total;                        ///< [1] row_offsets[G]
  const int32_t* group_expert;    ///< [G] expert id of each group; shared s: E + s; rank_major: -1
  const ferry_source* source;     ///< [total]; expert_indexed: [row_total], slot -1
  const float* weight;            ///< [total]; rank_major: [total, K]; NULL without weights
  const int32_t* local_ids;       ///< rank_major: [total, K] local expert of each slot, or -1
  const int32_t* group_of_row;    ///< [total], -1 on padding; NULL unless memory was passed
  const float* dots;              ///< [total]; NULL without dot_rows
  const ferry_host_totals* host;  ///< in host memory
  uint64_t call;                  ///< call number on the lane
  ferry_plan plan;                ///< pass it to ferry_combine()
  /// [G + 1] first row of tiles of each group, with scales in tiles; NULL otherwise. The tiles of group g are
  /// parts[1].row_bytes * tile_offsets[g] bytes from parts[1].data.
  const int32_t* tile_offsets;
  // FERRY_EXPERT_INDEXED: see ferry::DispatchResult; NULL or 0 with other layouts.
  const int32_t* index;           ///< [total] the row of each position; `row_capacity` on padding
  const int32_t* slot;            ///< [total] the slot of each position at its source; -1 on padding
  const int32_t* block_group;     ///< [capacity / alignment] group of each block; -1 from the total on
  const int32_t* source_offsets;  ///< [R + 1] first row of each source rank
  const int32_t* row_total;       ///< [1] source_offsets[R]
  int64_t row_capacity;           ///< R*T: rows there is room for
} ferry_dispatch_result;

#ifdef __cplusplus
}
#endif

#endif
