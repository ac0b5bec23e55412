// Kernels that measure what GPUs can move and how fast they signal. A rank's GPU is its number modulo the
// number of GPUs.
#pragma once

#include <string>
#include <vector>

namespace ferry::app {

// Names of the GPUs.
// @throws UnsupportedError  this build or machine has none
std::vector<std::string> gpu_names();

// Number of SMs of the first GPU.
int gpu_sms();

// Bytes per second out of the slowest rank while all ranks write to all others at once, with `sms` SMs each.
// With one rank 0, because nothing leaves it.
double measure_push(int ranks, int sms);

// Seconds for a flag to travel one way between two ranks: half of a round trip.
double measure_gpu_flag();

// Seconds for a barrier of all ranks inside a kernel.
double measure_gpu_barrier(int ranks);

// Seconds of an empty kernel of `blocks` blocks in a graph.
double measure_launch(int blocks);

}  // namespace ferry::app
