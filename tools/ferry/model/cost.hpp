// The cost model: the time of a call from its shape, its loads, a machine's limits and measured constants.
// docs/model.md explains every term.
#pragma once

#include <cstdint>

#include "ferry/config.hpp"
#include "ferry/trace.hpp"
#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/model/constants.hpp"

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

// Rows that the busiest rank of a call sends, receives and copies: what the model knows of routing. Where
// rows travel, the larger of what a rank sends and receives.
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

// ---- times

// The network between nodes, seen from one rank. Zero bytes: a single node.
struct Network {
  std::string name, text{};
  double bytes_per_second = 0;     // that a rank sends, and receives at the same time
  double latency_us = 0;           // of a put and its flag, one way
  double messages_per_second = 0;  // that a rank posts
};

// The networks known by name.
const std::vector<Network>& networks();

struct ModelCall {
  TimedCall call;
  Format format = Format::bf16();
  Layout layout = Layout::expert_major;
  int hidden = 7168;
  RoutingShape shape;
  Hops hops = Hops::one;  // of several nodes

  std::int64_t message_bytes() const;  // dispatch: values and scales of a row
  std::int64_t row_bytes() const;      // combine, and a token before quantisation
};

// Microseconds. Fields other than `total` are the terms before they are combined; of a pair, their sums.
struct Cost {
  double start = 0;    // launch, dependent steps, latencies
  double link = 0;     // the busiest rank's bytes within its node
  double network = 0;  // the busiest rank's bytes between nodes
  double sms = 0;      // its rows, by its SMs
  double memory = 0;   // its bytes in memory
  double total = 0;

  const char* largest() const;  // the name of the largest term
};

// @throws UsageError  work that the model does not have: metadata, nccl
Cost cost_of(const ModelCall& call, const Loads& loads, const Constants& constants, const GpuLimits& limits,
             const Network& network = {});

// Bytes that the busiest rank sends or receives between nodes, and within its node, in a dispatch or combine.
struct LinkBytes {
  double between = 0, within = 0;
};
LinkBytes link_bytes(const ModelCall& call, const Loads& loads);

}  // namespace ferry::app
