// A point of `ferry bench` on GPUs: ranks are threads, and take the GPUs in turn.
#pragma once

#include "apps/ferry/bench_point.hpp"

namespace ferry::app {

// Checks every set, then times: 20 calls that take turns with the sets are a graph; graphs follow each other
// on each rank's stream, and a replay lasts as long as on its slowest rank. Throws CheckFailed when a check
// fails, UnsupportedError without a GPU.
BenchResult play_device_bench(const BenchPoint& point);

}  // namespace ferry::app
