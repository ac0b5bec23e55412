// Routing traces: which experts a router chose for each token, with its weights. Recorded or synthesised. See
// ferry/trace.hpp for the names of traces and the files.
#ifndef FERRY_C_TRACE_H
#define FERRY_C_TRACE_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/// A trace. Immutable; several threads may read it at once.
typedef struct ferry_trace ferry_trace;

// All functions are local host code. FERRY_USAGE: a name, an argument or the content of a file is wrong.
// FERRY_SYSTEM: a file cannot be read or written.

/// Opens a trace by its name. `directory`: the folder of recorded traces; NULL: environment variable
/// FERRY_TRACES. `experts`: E of a recorded trace; 0: known for its folder, or the least power of two above
/// its ids.
ferry_status ferry_trace_open(const char* name, const char* directory, int experts, ferry_trace** trace);
/// NULL is allowed.
void ferry_trace_destroy(ferry_trace* trace);
/// Writes `<prefix>.ids.npy`, `<prefix>.weights.npy` and, if sequence lengths are known,
/// `<prefix>.seqlens.npy`. Replaces existing files.
ferry_status ferry_trace_save(const ferry_trace* trace, const char* prefix);

/// The contents of a trace. The arrays and texts belong to the trace.
typedef struct ferry_trace_info {
  size_t size;
  const char* name;    ///< the name it was opened by
  const char* source;  ///< its origin, in words
  int32_t layers;
  int32_t top_k;                    ///< K
  int32_t experts;                  ///< E
  int64_t tokens;                   ///< tokens of one layer
  const int32_t* ids;               ///< [layers, tokens, K], each in [-1, E); -1 is a masked slot
  const float* weights;             ///< [layers, tokens, K]; NULL: not recorded, each is 1 / K
  const int64_t* sequence_lengths;  ///< [sequences], whose sum is `tokens`; NULL if they are not known
  int64_t sequences;
} ferry_trace_info;

ferry_status ferry_trace_query(const ferry_trace* trace, ferry_trace_info* info);

/// The tokens of a trace that one rank dispatches in one step.
typedef struct ferry_trace_partition_args {
  size_t size;
  int32_t layer;
  int32_t rank, ranks;
  int64_t tokens_per_rank;
  int64_t step;
  int32_t* ids;          ///< receives [tokens_per_rank, K]
  float* weights;        ///< receives [tokens_per_rank, K]; may be NULL
  int64_t* first_token;  ///< receives the number of its first token in the trace; may be NULL
} ferry_trace_partition_args;

/// Selects a rank's part of a step: see ferry::PartitionSpec.
ferry_status ferry_trace_partition(const ferry_trace* trace, const ferry_trace_partition_args* args);

/// Routes to each expert in one layer: receives `counts` [E]. Masked slots are not counted.
ferry_status ferry_trace_expert_counts(const ferry_trace* trace, int layer, int64_t* counts);
/// Routes to each rank, from `counts` [experts]: receives `rank_counts` [ranks]. `expert_rank` [experts] is
/// the rank of each expert; NULL: see ferry_placement_blocks().
ferry_status ferry_rank_counts(const int64_t* counts, int experts, const int32_t* expert_rank, int ranks,
                               int64_t* rank_counts);

/// How unevenly the experts are loaded: see ferry::LoadStatistics.
typedef struct ferry_load_statistics {
  size_t size;
  int64_t routes;
  double max, p99, p90, p50, p10, min;  ///< loads divided by the mean load
  double sigma_ln, gini;
  int64_t idle;  ///< experts without a route
} ferry_load_statistics;

/// Statistics of `counts` [experts]. FERRY_USAGE: no counts, a negative count, or a sum of 0.
ferry_status ferry_statistics_of_load(const int64_t* counts, int experts, ferry_load_statistics* statistics);

#ifdef __cplusplus
}
#endif

#endif
