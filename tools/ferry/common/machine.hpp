// What this machine is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ferry::app {

std::string cpu_name();                   // as the system calls it; "unknown" where it does not
std::vector<std::string> cpu_features();  // of those that make a difference to Ferry, present ones
int cores();                              // that this process may use
std::int64_t memory_bytes();              // of the machine
std::int64_t available_memory_bytes();    // that could be had without swapping; 0: not known
std::int64_t cache_bytes();               // of the largest cache; 0: not known

std::string command_line();  // this process's, the program named `ferry`
std::string utc_now();       // such as 2026-11-21T04:00:00Z

}  // namespace ferry::app
