// The least that has to cross between ranks in a point of a bench.
#pragma once

#include "apps/ferry/bench_inputs.hpp"

namespace ferry::app {

// Bytes of the rank that sends or receives most, mean over the sets: a row for each distinct (token, remote
// rank), or with `routes` for each remote route.
struct BenchFloor {
  double dispatch_bytes = 0;  // values and scales
  double combine_bytes = 0;   // rows of Config::wire
};

BenchFloor floor_of(const BenchPoint& point, const BenchInputs& inputs);

}  // namespace ferry::app
