// The groups of ranks that commands run on.
#pragma once

#include <string>

#include "ferry/group.hpp"

namespace ferry::app {

// The ranks that mpirun has started, this process among them. `ranks`: as many as the user asked for; 0: any
// number. `backend`: for the error.
// @throws UsageError        mpirun has started another number
// @throws UnsupportedError  as Group::mpi()
Group mpi_group(int ranks, const std::string& backend = "collective");

// Ranks that this command starts, on `hosts` simulated hosts.
struct LocalGroup {
  int ranks;
  int hosts = 1;
  bool processes = false;
};

// @throws UsageError  the number of hosts does not divide that of the ranks
Group local_group(const LocalGroup& options);

// @throws UsageError  options of LocalGroup with ranks that mpirun has started
void refuse_local_options(const LocalGroup& options);

}  // namespace ferry::app
