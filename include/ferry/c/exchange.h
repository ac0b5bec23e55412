// The object that owns the buffers of one configuration on one rank, and what its operations take and return.
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

typedef struct ferry_exchange ferry_exchange;  // owns the buffers of one configuration on one rank

// Collective; blocks until every rank has called. FERRY_USAGE for a configuration that is wrong on any rank
// or differs between ranks, FERRY_SYSTEM when there is not enough memory. An exchange is destroyed before its
// rank's body returns.
ferry_status ferry_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                   ferry_exchange** exchange);
void ferry_exchange_destroy(ferry_exchange* exchange);  // local; NULL is allowed

// The configuration with every default filled in; its placement lies in the exchange.
ferry_status ferry_exchange_config(const ferry_exchange* exchange, ferry_config* config);
ferry_status ferry_exchange_sizes(const ferry_exchange* exchange, ferry_sizes* sizes);
ferry_status ferry_exchange_capacity(const ferry_exchange* exchange, int64_t* rows);

typedef struct ferry_tokens {          // rows of this rank's tokens [count, hidden]
  const void* parts[FERRY_MAX_PARTS];  // raw formats bring one pointer for each part, others one
  int64_t strides[FERRY_MAX_PARTS];    // bytes from row to row; 0: dense
  int64_t count;                       // N
  int32_t type;                        // value type; raw parts have none
} ferry_tokens;

typedef struct ferry_rows {  // experts' outputs, row for row as the arrivals lay, or the result of combine
  void* data;                // outputs are only read, and not past the total
  int64_t stride;            // bytes from row to row (unreduced result: from slot to slot); 0: dense
  int32_t type;              // value type
} ferry_rows;

// Memory for arrivals; NULL: the lane's own, which the lane's next dispatch overwrites.
typedef struct ferry_receive_buffers {
  void* parts[FERRY_MAX_PARTS];  // part p: capacity rows (values first, then scales), aligned to 16
  float* weight;                 // [capacity]; rank_major [capacity, top_k]
  int32_t* local_ids;            // rank_major [capacity, top_k]
  int32_t* group_of_row;         // [capacity], written only if given: group of a row, -1 on padding
  void* plan;                    // ferry_plan_bytes bytes, aligned to 16
} ferry_receive_buffers;

typedef struct ferry_received_part {
  void* data;
  int64_t row_bytes;          // bytes of a row of this part (scales in columns: of one element)
  int64_t leading_dimension;  // scales in columns: elements from column to column; 0 for rows
} ferry_received_part;

typedef struct ferry_host_totals {  // in host memory, stored after everything else, `call` last
  uint64_t call;
  int64_t total;
} ferry_host_totals;

// What dispatch returns. Memory belongs to the lane, until its next dispatch, or to the caller. Groups (G)
// are this rank's experts, in local order; for rank_major the source ranks.
typedef struct ferry_dispatch_result {
  size_t size;
  void* data;  // values: parts[0].data
  ferry_received_part parts[FERRY_MAX_PARTS];
  int64_t groups;               // G
  int64_t capacity;             // rows; expert_padded: rows an expert
  const int32_t* counts;        // [G] rows of a group, padding not counted
  const int32_t* row_offsets;   // [G+1] first row of a group
  const int32_t* total;         // one number: row_offsets[G]
  const int32_t* group_expert;  // [G] global expert id of a group; rank_major: -1
  const ferry_source* source;   // [total]
  const float* weight;          // [total], rank_major [total, top_k]; NULL without weights
  const int32_t* local_ids;     // rank_major [total, top_k]: local expert, or -1
  const int32_t* group_of_row;  // [total] if memory was given for it
  const float* dots;            // [total] if dot_rows was given
  const ferry_host_totals* host;
  uint64_t call;  // call number on the lane
  ferry_plan plan;
} ferry_dispatch_result;

#ifdef __cplusplus
}
#endif

#endif
