// Keeps every process that a job has started within reach, however they were started.
#pragma once

#include <sys/types.h>

#include "tools/ferry/launch/signals.hpp"

namespace ferry::app {

// Forks, and returns in the new process: the launcher. The old one, which the caller knows, stays before it:
// it passes on signals and exits as the launcher does. If either is killed, the other ends the job. Only the
// old one belongs to the terminal, so Ctrl-C and Ctrl-Z reach the ranks once, through the launcher. Returns
// the old process, which launchers compare with getppid() when SIGCHLD comes.
// @throws SystemError  the system cannot fork
pid_t start_launcher(const Signals& signals);

// Kills the children of this process. start_launcher() has made it adopt orphans among its descendants, so
// calling this until no child is left kills every process of the job.
void kill_children();

// Whether this process has children, ended ones that nobody has waited for included.
bool has_children();

}  // namespace ferry::app
