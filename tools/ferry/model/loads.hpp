// Counts the rows that the busiest rank of a call sends, receives and copies: what the cost model knows of
// routing.
#pragma once

#include <cstdint>

#include "ferry/trace.hpp"

namespace ferry::app {

// A call's shape. Experts lie in equal blocks on the ranks, ranks in equal blocks on the nodes. A relay has
// the local rank of the source rank, as Topology::relay_of() says.
struct RoutingShape {
  int ranks = 1;
  int nodes = 1;
  int tokens = 0;  // per rank
  int experts = 0;
  int top_k = 0;

  int node_ranks() const { return ranks / nodes; }
};

// Rows of the rank that has most of them. Where rows travel, the larger of what a rank sends and receives.
struct Loads {
  double own = 0;          // distinct (token, the token's own rank), mean over the ranks
  double near = 0;         // distinct (token, other rank of the token's node)
  double near_routes = 0;  // routes to other ranks of the token's node
  double far = 0;          // distinct (token, rank of another node)
  double far_routes = 0;   // routes to ranks of other nodes
  double far_nodes = 0;    // distinct (token, other node): what crosses the network in two hops
  double forwarded = 0;    // two hops: distinct (token, rank of another node that is not the relay)
  double routes = 0;       // routes that arrive at a rank, from all ranks

  double arrivals() const { return own + near + far; }  // distinct (token, rank) at one rank
};

// Every set of K experts equally likely. Drawn with a seed; equal arguments give equal loads. Of a call with
// more than kSimulatedTokens tokens over all ranks only so many are drawn: means grow with the tokens, and
// what the busiest rank has beyond the mean with their square root.
inline constexpr std::int64_t kSimulatedTokens = std::int64_t{1} << 20;
Loads uniform_loads(const RoutingShape& shape, std::uint64_t seed = 1);

// As `trace` routes: mean over its layers, at most four, of the first step. Experts and top_k must be those
// of the trace. Tokens past kSimulatedTokens are not looked at: a skew keeps its proportion.
Loads trace_loads(const RoutingShape& shape, const Trace& trace);

// Expected number of distinct groups of `group` experts each that the K chosen of `experts` experts fall
// into, K different experts uniformly drawn.
double expected_groups(int experts, int group, int top_k);

}  // namespace ferry::app
