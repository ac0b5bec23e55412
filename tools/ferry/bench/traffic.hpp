// Computes from a benchmark's routes the traffic between ranks, and the lower bound of bytes that any
// implementation must move.
#pragma once

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

}  // namespace ferry::app
