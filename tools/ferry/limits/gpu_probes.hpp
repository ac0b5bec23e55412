// What the GPUs of this machine can move, and how fast they signal. Ranks take the GPUs in turn.
#pragma once

#include <string>
#include <vector>

namespace ferry::app {

// Names of the GPUs. Throws UnsupportedError if this build or machine has none.
std::vector<std::string> gpu_names();

// SMs of the first GPU.
int gpu_sms();

// Bytes a second that leave each rank while all push to all others at once, with so many SMs each: of the
// slowest. With one rank nothing leaves: 0.
double measure_push(int ranks, int sms);

// Seconds for a flag to go one way between two ranks: half of a round trip.
double measure_gpu_flag();

// Seconds for the ranks to meet inside a kernel.
double measure_gpu_barrier(int ranks);

// Seconds an empty kernel of so many blocks takes in a graph.
double measure_launch(int blocks);

}  // namespace ferry::app
