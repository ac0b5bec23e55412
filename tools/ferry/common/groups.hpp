// The group that mpirun has started.
#pragma once

#include "ferry/group.hpp"

namespace ferry::app {

// The ranks that mpirun has started, this process among them. `ranks`: as many as the user asked for; 0: any
// number.
// @throws UsageError        mpirun has started another number
// @throws UnsupportedError  as Group::mpi()
Group mpi_group(int ranks);

}  // namespace ferry::app
