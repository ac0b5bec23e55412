#include "tools/ferry/launch/process_tree.hpp"

#include <fmt/core.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>

#include "base/errors.hpp"

namespace ferry::app {

namespace {

// Kills what a killed launcher has left.
void end_job() {
  constexpr int kAttempts = 200;  // 2 s: another user's process cannot be killed
  constexpr useconds_t kPause = 10000;
  for (int i = 0; i < kAttempts && has_children(); ++i) {
    kill_children();
    while (waitpid(-1, nullptr, WNOHANG) > 0) continue;
    usleep(kPause);
  }
}

// The process before the launcher.
[[noreturn]] void follow(pid_t launcher, const Signals& signals) {
  int status = 0;
  while (waitpid(launcher, &status, WNOHANG) != launcher) {
    const int signal = signals.wait();
    if (signal != SIGCHLD) kill(launcher, signal);
    if (signal == SIGTSTP) raise(SIGSTOP);
  }
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  fmt::print(stderr, "ferry: the launcher (process {}) was killed by signal {}\n", launcher,
             WTERMSIG(status));
  end_job();
  _exit(128 + WTERMSIG(status));
}

}  // namespace

pid_t start_launcher(const Signals& signals) {
  const pid_t before = getpid(), launcher = fork();
  if (launcher < 0) throw system_error("cannot fork the launcher", errno);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  if (launcher > 0) follow(launcher, signals);
  setsid();  // away from the terminal, which ranks may read all the same
  prctl(PR_SET_PDEATHSIG, SIGCHLD);
  if (getppid() != before) _exit(1);
  return before;
}

void kill_children() {
  std::ifstream children(fmt::format("/proc/self/task/{}/children", getpid()));
  for (pid_t child = 0; children >> child;) kill(child, SIGKILL);
}

bool has_children() {
  siginfo_t ended{};
  return waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0;
}

}  // namespace ferry::app
