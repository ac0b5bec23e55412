// The least that has to cross between ranks in a point of a bench.
#pragma once

#include "tools/ferry/bench/device_work.hpp"
#include "tools/ferry/bench/inputs.hpp"

namespace ferry::app {

// Rows of the rank that sends or receives most, mean over the sets.
struct Crossings {
  double pairs = 0;   // distinct (token, remote rank)
  double routes = 0;  // to remote ranks
};

Crossings crossings_of(const BenchPoint& point, const BenchInputs& inputs);

// Bytes that the busiest rank must send or receive in a call. Dispatch: values and scales for each pair, also
// where NCCL sends a row for each route. Combine: rows of Config::combine_type for each pair, of sums that
// are added at home for each route. 0 for counts.
double floor_bytes(const BenchPoint& point, const DeviceWork& work, const Crossings& busiest);

}  // namespace ferry::app
