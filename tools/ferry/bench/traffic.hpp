// Computes from a benchmark's routes the traffic between ranks, and the lower bound of bytes that any
// implementation must move.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/topology.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

BenchRouting routing_of(const BenchPoint& point, const BenchInputs& inputs);

// Rows of the rank that sends or receives most, mean over the input sets.
struct RemoteRows {
  double pairs = 0;   // distinct (token, remote rank)
  double routes = 0;  // routes to remote ranks
};

RemoteRows busiest_remote_rows(const BenchPoint& point, const BenchInputs& inputs);

// Bytes that the busiest rank must send or receive in a call. Dispatch, and NCCL in its place: values and
// scales for each (token, remote rank) pair. Combine: rows of Config::combine_type, one per pair for partial
// sums, one per remote route for sums that are computed on the source rank. Metadata: 0.
double lower_bound_bytes(const BenchPoint& point, const TimedCall& call, const RemoteRows& busiest);

// ---- the bytes that an all-to-all-v of the messages of a call carries between the ranks

// A number for each rank [R] and each rank that it sends to [R]. Ranks send nothing to themselves.
using RankMatrix = std::vector<std::vector<std::int64_t>>;

// Messages of a dispatch: (token, other rank); with two hops (token, other node), to the node's relay.
RankMatrix messages_between(const BenchPoint& point, const BenchInputs& inputs, int set,
                            const Topology& topology);

// Rows that a combine returns, from each rank to each: for each message one, or one for each remote route if
// sums are not made on the experts' ranks.
RankMatrix rows_between(const BenchPoint& point, const BenchInputs& inputs, int set,
                        const Topology& topology);

// Bytes that one rank sends to and receives from each peer.
struct PeerBytes {
  std::vector<std::int64_t> send, receive;

  std::int64_t sent() const;
  std::int64_t received() const;
};

// `bytes` [R]: that each rank sends, divided like `messages`.
PeerBytes transfer_of(const RankMatrix& messages, const std::vector<std::int64_t>& bytes, int rank);

std::int64_t sum_of(const std::vector<std::int64_t>& values);

}  // namespace ferry::app
