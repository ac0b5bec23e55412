// A job of `ferry launch`: one process for each rank, on this host.
#pragma once

#include <string>
#include <vector>

namespace ferry::app {

struct RankFailure {
  std::string text;  // one line
  int status;        // its exit status; 128 + n if signal n killed it
};

// Starts `command` once for each rank, with the environment variable that Group::launched() reads, and waits
// for all of them. Each rank leads a process group. When a rank fails, the others have 10 s to end by
// themselves; then they are killed, with all that the ranks have started. Signals are passed on to the ranks;
// after one that asks them to end they have 2 s. Does not return in the calling process, but in one that it
// forks. Returns the ranks that failed, the first to fail first; none if all exited with status 0. Throws
// SystemError if the command cannot be started.
std::vector<RankFailure> run_job(int ranks, const std::vector<std::string>& command);

}  // namespace ferry::app
