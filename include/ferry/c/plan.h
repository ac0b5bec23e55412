// A plan: all that follows from ids and placement, as a value.
#ifndef FERRY_C_PLAN_H
#define FERRY_C_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

// All that follows from ids and placement: ferry_plan_bytes bytes without pointers into anything, aligned
// to 16. A plan returned by dispatch lies in the lane, until its next dispatch, or in the caller's memory; a
// copy may be kept for another dispatch or combine. Storage copied by other means is used by
// setting both fields.
typedef struct ferry_plan {
  void* storage;
  size_t bytes;
} ferry_plan;

typedef struct ferry_source {  // where a row came from; -1, -1, -1: padding. rank_major: slot -1.
  int32_t rank, token, slot;
} ferry_source;

typedef struct ferry_plan_info {  // arrays lie in the plan's storage
  size_t size;
  int32_t rank, ranks;  // the rank whose plan it is, and how many there are
  int32_t experts, top_k;
  int64_t tokens;  // N of this rank
  uint64_t placement_version;
  int64_t total;                  // rows on this rank, padding between groups included
  int64_t dropped;                // routes (rank_major: rows) dropped on all ranks
  const int32_t* counts;          // [ranks, experts] routes of every rank to every expert
  const int32_t* tokens_between;  // [ranks, ranks] tokens that rank s sends to rank d
  const ferry_source* sources;    // [total]
} ferry_plan_info;

// Local, in host memory. FERRY_USAGE for a plan that is empty, unfinished, damaged or too short for what it
// says, a token or slot that it does not have, and too little or misaligned storage.
ferry_status ferry_plan_query(const ferry_plan* plan, ferry_plan_info* info);
// Rank and row there of one slot: -1 and -1 masked, row -1 dropped.
ferry_status ferry_plan_route(const ferry_plan* plan, int token, int slot, int32_t* rank, int64_t* row);
// Copies into the caller's storage; `copy` becomes the handle on it.
ferry_status ferry_plan_copy(const ferry_plan* plan, void* storage, size_t bytes, ferry_plan* copy);

#ifdef __cplusplus
}
#endif

#endif
