// Counts, from the ids of one rank, the tokens that a dispatch sends to each rank and the routes to each
// expert. Nothing is sent.
#pragma once

#include <cstdint>

#include "ferry/exchange.hpp"
#include "ferry/placement.hpp"
#include "ferry/topology.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Where dispatch_layout() writes. The memory is the caller's: of the host, or for BackendKind::cuda memory
/// that the current device can access.
struct DispatchLayout {
  std::int32_t* tokens_per_rank = nullptr;    ///< [R] tokens with at least one expert on the rank
  std::int32_t* routes_per_expert = nullptr;  ///< [E]
  bool* token_in_rank = nullptr;  ///< [N, R] whether the token has an expert on the rank; null: not wanted
  /// [nodes] tokens with at least one expert on a rank of the node; null: not wanted
  std::int32_t* tokens_per_node = nullptr;
};

/// Counts the routes of ids [N, K] without sending anything. Local: no other rank takes part.
///
/// Masked slots and ids out of range are not counted; dispatch reports the latter. An expert that a token
/// lists twice counts as two routes and as one token.
///
/// @param ids  in memory of the same kind as the results; may be empty if `tokens` is 0
/// @param tokens  N
/// @param topology  the nodes of the R ranks, such as those of Rank::topology(); needed with
/// DispatchLayout::tokens_per_node, otherwise null
/// @param backend  cuda: enqueues one kernel on `stream`, of the current device, and returns; the inputs must
/// stay unchanged until the stream has executed it. Others: the calling thread counts.
/// @throws UsageError  an argument is null, out of range, or memory that the device cannot access
/// @throws UnsupportedError  a build without the cuda backend, or more ranks or experts than it supports
void dispatch_layout(const Ids& ids, std::int64_t tokens, int top_k, const Placement& placement,
                     const DispatchLayout& result, const Topology* topology = nullptr,
                     BackendKind backend = BackendKind::automatic, Stream stream = {});

}  // namespace ferry
