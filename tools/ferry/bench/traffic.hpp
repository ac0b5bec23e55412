// The least that has to cross between ranks in a point of a bench.
#pragma once

#include "tools/ferry/bench/device_work.hpp"
#include "tools/ferry/bench/inputs.hpp"

namespace ferry::app {

// Rows of the rank that sends or receives most, mean over the sets.
struct RemoteRows {
  double pairs = 0;   // distinct (token, remote rank)
  double routes = 0;  // to remote ranks
};

RemoteRows busiest_remote_rows(const BenchPoint& point, const BenchInputs& inputs);

// Bytes that the busiest rank must send or receive in a call. Dispatch: values and scales for each pair, also
// where NCCL sends a row for each route. Combine: rows of Config::combine_type for each pair, of sums that
// are added at home for each route. 0 for counts.
double lower_bound_bytes(const BenchPoint& point, const GpuWork& work, const RemoteRows& busiest);

}  // namespace ferry::app
