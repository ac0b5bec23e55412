// Counts, from the ids of one rank, the tokens that a dispatch sends to each rank and the routes to each
// expert. Nothing is sent.
#pragma once

#include <cstdint>

#include "ferry/exchange.hpp"
#include "ferry/placement.hpp"
#include "ferry/topology.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// The ids of one rank, and where their experts are.
struct RankIds {
  Ids ids{};                ///< [tokens, top_k]; may be empty if `tokens` is 0
  std::int64_t tokens = 0;  ///< N
  int top_k = 0;            ///< K
  const Placement& placement;
  /// The nodes of the R ranks, such as those of Rank::topology(); needed with
  /// DispatchLayout::tokens_per_node.
  const Topology* topology = nullptr;
  /// The rank whose ids these are, which decides the replica that a route takes; with Config::input
  /// replicated 0. Without effect where the placement has no replicas.
  int source = 0;
};

/// Where dispatch_layout() writes. The memory is the caller's, of the same kind as that of the ids.
struct DispatchLayout {
  std::int32_t* tokens_per_rank = nullptr;    ///< [R] tokens with at least one expert on the rank
  std::int32_t* routes_per_expert = nullptr;  ///< [E]; with replicas [P], of each
  bool* token_in_rank = nullptr;  ///< [N, R] whether the token has an expert on the rank; null: not wanted
  /// [nodes] tokens with at least one expert on a rank of the node; null: not wanted
  std::int32_t* tokens_per_node = nullptr;
};

/// Counts the routes of ids without sending anything. Local: no other rank takes part.
///
/// Masked slots and ids out of range are not counted; dispatch reports the latter. An expert that a token
/// lists twice counts as two routes and as one token.
///
/// @param memory  of the ids and results. host, automatic: the calling thread counts. device: enqueues one
/// kernel on `stream`, of the current device, which can access the memory, and returns; the inputs must stay
/// unchanged until the stream has executed it.
/// @throws UsageError  an argument is null, out of range, or memory that the device cannot access
/// @throws UnsupportedError  a build without the cuda backend, or more ranks or experts than it supports
void dispatch_layout(const RankIds& ids, const DispatchLayout& result,
                     MemoryKind memory = MemoryKind::automatic, Stream stream = {});

}  // namespace ferry
