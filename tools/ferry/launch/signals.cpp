#include "tools/ferry/launch/signals.hpp"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>

#include "base/errors.hpp"

namespace ferry::app {

Signals::Signals() {
  std::signal(SIGCHLD, SIG_DFL);  // ignored, it would hide how children end
  sigemptyset(&set_);
  for (const int signal : {SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP}) {
    struct sigaction now{};
    sigaction(signal, nullptr, &now);
    if (now.sa_handler != SIG_IGN) sigaddset(&set_, signal);
  }
  pthread_sigmask(SIG_BLOCK, &set_, &previous_);
  file_ = FileDescriptor(signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!file_.valid()) throw system_error("cannot watch for signals", errno);
}

int Signals::wait() const {
  int signal = 0;
  sigwait(&set_, &signal);
  return signal;
}

int Signals::next() const {
  signalfd_siginfo info{};
  return read(file_.number(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
}

}  // namespace ferry::app
