#include "group/rank_process.hpp"

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/errors.hpp"
#include "base/text.hpp"

namespace ferry {

RankProcess::RankProcess(int rank, pid_t process)
    : rank_(rank), process_(process), descriptor_(static_cast<int>(syscall(SYS_pidfd_open, process, 0))) {
  if (descriptor_ >= 0) return;
  const int error = errno;
  kill("it cannot be watched");
  reap();
  throw system_error(str("cannot watch the process of rank ", rank), error);
}

RankProcess::~RankProcess() {
  if (!status_) {
    kill("the launcher gave up");
    reap();
  }
  close(descriptor_);
}

bool RankProcess::stopped() const {
  siginfo_t info{};
  constexpr int kLookOnly = WSTOPPED | WNOHANG | WNOWAIT;
  return waitid(P_PID, static_cast<id_t>(process_), &info, kLookOnly) == 0 && info.si_pid == process_;
}

void RankProcess::kill(const std::string& why) {
  if (why_killed_.empty()) why_killed_ = why;
  ::kill(process_, SIGKILL);  // the number cannot be reused before reap()
}

void RankProcess::reap() {
  int status = 0;
  while (waitpid(process_, &status, 0) < 0 && errno == EINTR) {
  }
  status_ = status;
}

bool RankProcess::signalled() const {
  return status_ && WIFSIGNALED(*status_);
}

std::string RankProcess::describe_exit() const {
  const std::string process = str("rank ", rank_, " (process ", process_, ")");
  if (signalled()) {
    const int signal = WTERMSIG(*status_);
    return str(process, " was killed by signal ", signal, " (", strsignal(signal), ")");
  }
  return str(process, " exited with status ", WEXITSTATUS(*status_));
}

}  // namespace ferry
