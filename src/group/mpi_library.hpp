// MPI, which Ferry loads at run time as a module of its own: the control plane and the engine of
// Group::mpi().
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/control_block.hpp"
#include "group/mpi/module.h"

namespace ferry {

// The paths where the MPI module is looked for, in this order. A name without a folder is looked up by the
// dynamic loader.
std::vector<std::filesystem::path> mpi_module_paths();

// Why a file cannot be loaded as the MPI module.
struct MpiModuleFault {
  std::string text;            // empty: it can be loaded
  bool lacks_library = false;  // the module is there, and a library that it needs is not: most likely MPI's
};

// Loads the module if it can be loaded, for good. Does not open MPI.
MpiModuleFault mpi_module_fault(const std::filesystem::path& path);

// Loads the module and opens MPI, once for the process; the module stays loaded. Collective over all
// processes of the MPI job. Throws UnsupportedError if the module or MPI cannot be used, UsageError in a
// process forked from one that has opened MPI.
//
// At exit Ferry finalises MPI if it has initialised it, and if no rank is missing: MPI_Finalize waits for all
// ranks, the dead ones included.
const ferry_mpi& open_mpi();

// Notes a group over MPI. After its failure MPI is not finalised.
void watch_mpi_group(std::shared_ptr<const ControlBlock> control);

// Starts an operation of open_mpi() and hands it over, as the functions of ferry_mpi do.
using StartMpiOperation = std::function<int(ferry_mpi_operation** operation, char* message)>;

// Starts an operation and blocks until it is done. Calls `check` at least every 10 ms; `check` throws to give
// up. After any exception MPI may use the operation's memory until the process ends: never free it. Throws
// SystemError if MPI reports an error.
void run_mpi_operation(const StartMpiOperation& start, const std::function<void()>& check);

}  // namespace ferry
