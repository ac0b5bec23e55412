// A job of `ferry launch`: one process for each rank, on this host.
#pragma once

#include <string>
#include <vector>

namespace ferry::app {

// Starts `command` once for each rank, with the environment variable that Group::launched() reads, and waits
// for all of them. When a rank fails, the others have 10 s to end by themselves; then they are killed. SIGINT
// and SIGTERM are passed on to the ranks. Returns a line for each rank that failed, the first to fail first;
// none if all exited with status 0. Throws SystemError if the command cannot be started.
std::vector<std::string> run_job(int ranks, const std::vector<std::string>& command);

}  // namespace ferry::app
