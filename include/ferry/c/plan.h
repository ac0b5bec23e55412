// Plans: the destination and row of every route of a dispatch. Combine reads the plan; it can be kept and
// reused for later dispatches.
#ifndef FERRY_C_PLAN_H
#define FERRY_C_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A handle to a plan: one block of ferry_plan_bytes() bytes, aligned to 16, that holds indices and no
/// pointers.
///
/// The block belongs to the lane, until its next dispatch, or to the caller. It may be copied byte for byte,
/// kept, and used for another dispatch or combine. To use a block copied by other means, set the fields.
typedef struct ferry_plan {
  void* storage;
  size_t bytes;
  /// Call number of the dispatch that the plan is of. Host backends refuse the handle once another dispatch
  /// has filled the block. 0: not checked, as with device backends.
  uint64_t call;
  int64_t reserved[2];  ///< 0, see ferry/ferry.h
} ferry_plan;

/// Where a received row comes from. Padding: -1, -1, -1. rank_major rows, which stand for a whole token: slot
/// -1. Rows of shared expert s: this rank, slot K + s.
typedef struct ferry_source {
  int32_t rank, token, slot;
} ferry_source;

/// The contents of a plan. The arrays are in the plan's storage.
typedef struct ferry_plan_info {
  size_t size;
  int32_t rank, ranks;     ///< the rank whose plan it is, and R
  int32_t experts, top_k;  ///< E, with replicas P; K
  int64_t tokens;          ///< N of this rank
  uint64_t placement_version;
  int64_t total;                  ///< rows on this rank, padding between groups included
  int64_t dropped;                ///< routes and shared rows dropped on all ranks together (rank_major: rows)
  const int32_t* counts;          ///< [R, E] routes of every rank to every expert; to every replica [R, P]
  const int32_t* tokens_between;  ///< [R, R] tokens that rank s sends to rank d, at [s, d]
  const ferry_source* sources;    ///< [total]
} ferry_plan_info;

// The functions below are local and read host memory. They return FERRY_USAGE for a plan that is empty,
// unfinished, damaged, or longer than its `bytes`.

/// Fills `info`.
ferry_status ferry_plan_query(const ferry_plan* plan, ferry_plan_info* info);
/// The destination rank of a slot, and its row there. Masked: -1 and -1. Dropped: row -1. FERRY_USAGE: the
/// plan has no such token or slot.
ferry_status ferry_plan_route(const ferry_plan* plan, int token, int slot, int32_t* rank, int64_t* row);
/// Copies the plan into the caller's `storage`, aligned to 16 bytes; `copy` becomes a handle to it.
/// FERRY_USAGE: `bytes` is too small, or `storage` misaligned.
ferry_status ferry_plan_copy(const ferry_plan* plan, void* storage, size_t bytes, ferry_plan* copy);

#ifdef __cplusplus
}
#endif

#endif
