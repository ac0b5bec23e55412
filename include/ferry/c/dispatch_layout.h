// Counts, from the ids of one rank, the tokens that a dispatch sends to each rank and the routes to each
// expert. Nothing is sent.
#ifndef FERRY_C_DISPATCH_LAYOUT_H
#define FERRY_C_DISPATCH_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Arguments of ferry_dispatch_layout(). The arrays are in host memory, or with FERRY_DEVICE_MEMORY in memory
/// that the current device can access.
typedef struct ferry_dispatch_layout_args {
  size_t size;
  const void* ids;  ///< [N, K] dense
  int64_t tokens;   ///< N
  int32_t id_type;  ///< FERRY_INT32, FERRY_INT64
  int32_t top_k;    ///< K
  int32_t experts;  ///< E
  int32_t ranks;    ///< R
  /// As in ferry_config. Both NULL: see ferry_placement_blocks().
  const int32_t* expert_rank;
  const int32_t* expert_local;
  int32_t* tokens_per_rank;    ///< [R] tokens with at least one expert on the rank
  int32_t* routes_per_expert;  ///< [E]
  uint8_t* token_in_rank;      ///< [N, R] 1 if the token has an expert on the rank, otherwise 0; or NULL
  int32_t* tokens_per_node;    ///< [nodes] tokens with at least one expert on a rank of the node; or NULL
  int32_t memory;              ///< default: FERRY_MEMORY_AUTOMATIC, host memory
  void* stream;                ///< FERRY_DEVICE_MEMORY: the kernel is enqueued on it
  /// [R] with tokens_per_node: ranks with equal numbers, which may be any, are on one node; nodes are counted
  /// in the order of their lowest ranks.
  const int32_t* node_of_rank;
  /// As in ferry_config. With replicas routes_per_expert is [P], of each replica.
  const int32_t* held_experts;
  const int32_t* held_counts;
  int64_t source;  ///< the rank whose ids these are, with replicas; default 0
} ferry_dispatch_layout_args;

/// Counts the routes of ids without sending anything. Local. See ferry::dispatch_layout.
ferry_status ferry_dispatch_layout(const ferry_dispatch_layout_args* args);

#ifdef __cplusplus
}
#endif

#endif
