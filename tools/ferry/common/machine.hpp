// Describes this machine: processor, cores, memory; and measures how fast its threads copy memory.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace ferry::app {

std::string cpu_name();                   // as the system calls it; "unknown" if it does not say
std::vector<std::string> cpu_features();  // the instruction sets present, of those that Ferry has kernels for
int cores();                              // that this process may use
std::int64_t memory_bytes();              // installed
std::string machine_line();               // processor, cores and memory
nlohmann::ordered_json machine_json();    // the same
std::int64_t available_memory_bytes();    // that can be allocated without swapping; 0: unknown

std::string command_line();  // of this process, with the program named `ferry`
std::string utc_now();       // such as 2026-11-21T04:00:00Z

// Throws SystemError if less than `bytes` of memory can be allocated. The message begins with `task`.
void require_free_memory(double bytes, const std::string& task);

// Median of repeated measurements, and the range of the middle eight tenths.
struct Spread {
  double median, low, high;  // percentiles 50, 10 and 90
};

Spread spread_of(std::vector<double> values);  // at least one

// Bytes read plus bytes written per second by `threads` threads that copy at once with memcpy, each between
// two buffers of its own, in several rounds, each as long as its slowest thread. With fewer cores than
// threads the threads share the cores, as ranks do. Takes about 0.2 s; a call within a second of the last one
// for as many threads returns its value.
Spread memcpy_bytes_per_second(int threads);

}  // namespace ferry::app
