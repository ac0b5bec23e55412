#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <optional>
#include <vector>

#include "base/system_error.hpp"
#include "base/text.hpp"
#include "group/launcher.hpp"

namespace ferry {

namespace {

using Clock = std::chrono::steady_clock;

// How long the survivors of a failure may go on beyond the group's deadline before they are killed.
constexpr double kGrace = 2.0;
constexpr int kPollMilliseconds = 100;

// One rank's process. Killed and reaped at the latest by the destructor.
class Child {
 public:
  Child(int rank, pid_t process)
      : rank_(rank), process_(process), descriptor_(static_cast<int>(syscall(SYS_pidfd_open, process, 0))) {}
  ~Child() {
    if (!status_) {
      kill();
      reap();
    }
    if (descriptor_ >= 0) close(descriptor_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int rank() const { return rank_; }
  int descriptor() const { return descriptor_; }
  bool running() const { return !status_; }
  bool killed_by_launcher() const { return killed_; }

  void kill() {
    killed_ = true;
    ::kill(process_, SIGKILL);  // the number is its own until it is reaped
  }

  void reap() {
    int status = 0;
    while (waitpid(process_, &status, 0) < 0 && errno == EINTR) {
    }
    status_ = status;
  }

  // It ended, and neither it nor the launcher had said so.
  bool vanished() const { return vanished_; }
  void set_vanished() { vanished_ = true; }

  std::string how_it_ended() const {
    const std::string who = str("rank ", rank_, " (process ", process_, ")");
    if (WIFSIGNALED(*status_)) {
      const int signal = WTERMSIG(*status_);
      return str(who, " was killed by signal ", signal, " (", strsignal(signal), ")");
    }
    return str(who, " exited with status ", WEXITSTATUS(*status_), " instead of returning");
  }

 private:
  int rank_;
  pid_t process_;
  int descriptor_;
  bool killed_ = false;
  bool vanished_ = false;
  std::optional<int> status_;
};

class ProcessLauncher : public Group::Launcher {
 public:
  using Launcher::Launcher;

  void run(const std::function<void(Rank)>& body) override {
    const auto control =
        std::make_shared<GroupControl>(Mapping::anonymous_shared(GroupControl::bytes(ranks())), ranks());
    std::vector<std::unique_ptr<Child>> children;
    for (int rank = 0; rank < ranks(); ++rank) children.push_back(start(control, rank, body));
    wait_for_all(children, *control);
    throw_first_error(children, *control);
  }

 private:
  std::unique_ptr<Child> start(const std::shared_ptr<GroupControl>& control, int rank,
                               const std::function<void(Rank)>& body) const {
    // What stands in the buffers would be written by every child again.
    std::fflush(nullptr);
    std::cout.flush();
    const pid_t parent = getpid();
    const pid_t process = fork();
    if (process < 0) throw system_error(str("cannot fork the process of rank ", rank), errno);
    if (process == 0) be_child(parent, control, rank, body);
    auto child = std::make_unique<Child>(rank, process);
    if (child->descriptor() < 0) throw system_error(str("cannot watch the process of rank ", rank), errno);
    return child;
  }

  [[noreturn]] void be_child(pid_t parent, const std::shared_ptr<GroupControl>& control, int rank,
                             const std::function<void(Rank)>& body) const {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // it ended before the line above
    int status = 0;
    try {
      run_rank(control, rank, body);
    } catch (...) {
      status = 1;  // run() in the parent throws it
    }
    std::cout.flush();
    std::fflush(nullptr);
    _exit(status);  // what the parent registered to run at exit is the parent's
  }

  // Returns when every child has been reaped. A stopped or hanging one does not outlive the grace after a
  // failure.
  void wait_for_all(std::vector<std::unique_ptr<Child>>& children, GroupControl& control) const {
    std::optional<Clock::time_point> failed_at;
    while (true) {
      std::vector<pollfd> entries;
      std::vector<Child*> running;
      for (const auto& child : children) {
        if (!child->running()) continue;
        entries.push_back({child->descriptor(), POLLIN, 0});
        running.push_back(child.get());
      }
      if (running.empty()) return;
      poll(entries.data(), entries.size(), kPollMilliseconds);
      for (std::size_t i = 0; i < running.size(); ++i) {
        if (entries[i].revents != 0) note_end(*running[i], control);
      }
      if (!failed_at && control.failed()) failed_at = Clock::now();
      if (failed_at && Clock::now() - *failed_at > std::chrono::duration<double>(deadline() + kGrace)) {
        for (Child* child : running) {
          if (child->running()) child->kill();
        }
      }
    }
  }

  static void note_end(Child& child, GroupControl& control) {
    child.reap();
    const Presence presence = control.presence_of(child.rank());
    if (presence == Presence::left || presence == Presence::lost || child.killed_by_launcher()) return;
    child.set_vanished();
    WaitRecord record;
    record.rank = record.peer = child.rank();
    control.lose(child.rank(), failure_record(ErrorRecord::Kind::peer_lost, record, child.how_it_ended()),
                 control.launcher());
  }

  void throw_first_error(const std::vector<std::unique_ptr<Child>>& children,
                         const GroupControl& control) const {
    const int first = control.first_lost();
    if (first >= 0) {
      const ErrorRecord& error = control.error_of(first);
      // A survivor may have noticed a death before the launcher did, which knows the signal.
      const bool by_death =
          error.kind == ErrorRecord::Kind::peer_lost && children[error.wait.peer]->vanished();
      (by_death ? control.error_of(error.wait.peer) : error).raise();
    }
    for (const auto& child : children) {
      if (!child->killed_by_launcher()) continue;
      control.failure().raise(str("rank ", child->rank(), " was killed because it did not end within ",
                                  deadline() + kGrace, " s of the group's failure: "));
    }
  }
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_processes(Topology topology) {
  return std::make_shared<ProcessLauncher>(topology);
}

}  // namespace ferry
