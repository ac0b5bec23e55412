// The engine `mpi`.
#pragma once

#include <memory>

#include "engine/engine.hpp"

namespace ferry {

// Its transfers use open_mpi(). Collective over all processes of the MPI job, with the errors of open_mpi().
std::shared_ptr<Engine> make_mpi_engine();

}  // namespace ferry
