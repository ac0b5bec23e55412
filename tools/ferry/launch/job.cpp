#include "tools/ferry/launch/job.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <optional>

#include "base/descriptors.hpp"
#include "base/errors.hpp"
#include "group/bootstrap_link.hpp"
#include "group/launch_processes.hpp"
#include "tools/ferry/launch/meeting_point.hpp"
#include "tools/ferry/launch/process_tree.hpp"
#include "tools/ferry/launch/signals.hpp"

namespace ferry::app {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kGrace(10);       // for the other ranks, after one has failed
constexpr std::chrono::seconds kSignalGrace(2);  // after a signal that asks the job to end
constexpr std::chrono::seconds kKillGrace(2);    // for processes that the ranks have left to be gone

class Job {
 public:
  Job(int ranks, const std::vector<std::string>& command)
      : ranks_(ranks), parent_(start_launcher(signals_)), meeting_(ranks) {
    for (const std::string& word : command) words_.push_back(const_cast<char*>(word.c_str()));
    words_.push_back(nullptr);
  }

  std::vector<RankFailure> run() {
    try {
      for (int rank = 0; rank < ranks_; ++rank) processes_.push_back(start(rank));
      while (!ended()) {
        wait_for_events();
        meeting_.serve();
      }
    } catch (...) {
      end_by(Clock::now());
      while (!ended()) wait_for_events();
      throw;
    }
    return failures_;
  }

 private:
  // Starts the command as `rank`. Throws SystemError if that fails, exec() included.
  std::unique_ptr<RankProcess> start(int rank) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw system_error("cannot create a pipe", errno);
    const FileDescriptor from(ends[0]);
    FileDescriptor to(ends[1]);
    const std::string variable = LaunchedRank{rank, ranks_, meeting_.address()}.text();
    const pid_t parent = getpid(), process = fork();
    if (process < 0) throw system_error("cannot fork the process of a rank", errno);
    if (process == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      setpgid(0, 0);
      signals_.restore();
      setenv("FERRY_LAUNCH", variable.c_str(), 1);
      execvp(words_[0], words_.data());
      const int error = errno;
      const bool sent = write(to.number(), &error, sizeof error) == sizeof error;
      _exit(sent ? 127 : 126);
    }
    auto child = std::make_unique<RankProcess>(rank, process);
    to = FileDescriptor();
    int error = 0;
    if (read(from.number(), &error, sizeof error) == sizeof error) {
      child->reap();
      throw system_error(fmt::format("cannot start {}", words_[0]), error);
    }
    return child;
  }

  bool any_running() const {
    return std::ranges::any_of(processes_, [](const auto& process) { return process->running(); });
  }

  // All ranks have, and after a failure all that they have left behind.
  bool ended() const {
    if (any_running()) return false;
    return !kill_at_ || Clock::now() > *kill_at_ + kKillGrace || !has_children();
  }

  void wait_for_events() {
    std::vector<pollfd> entries{{signals_.descriptor(), POLLIN, 0}};
    meeting_.add_to(entries);
    constexpr int kPollMilliseconds = 100;
    poll(entries.data(), entries.size(), kill_at_ ? kPollMilliseconds : -1);
    pass_on_signals();
    reap_ended();  // after SIGCHLD was read: a later end wakes poll() again
    if (kill_at_ && Clock::now() >= *kill_at_) kill_all();
  }

  void reap_ended() {
    siginfo_t child{};
    while (waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT) == 0 && child.si_pid != 0) {
      const auto is_rank = [&](const auto& process) { return process->process() == child.si_pid; };
      const auto found = std::ranges::find_if(processes_, is_rank);
      if (found == processes_.end()) {
        waitpid(child.si_pid, nullptr, 0);  // a rank that has ended had started it
      } else {
        (*found)->reap();
        handle_exit(**found, child.si_code == CLD_EXITED ? child.si_status : 128 + child.si_status);
      }
      child = {};
    }
  }

  void handle_exit(const RankProcess& process, int status) {
    meeting_.set_lost(process.rank(), process.describe_exit());
    if (process.succeeded()) return;
    const std::string why = process.killed_by_launcher() ? ", because " + process.why_killed() : "";
    failures_.push_back({process.describe_exit() + why, status});
    end_by(Clock::now() + kGrace);
  }

  void pass_on_signals() {
    if (getppid() != parent_) end_by(Clock::now());
    while (const int signal = signals_.next()) {
      if (signal == SIGCHLD) continue;
      for (const auto& process : processes_)
        if (process->running()) kill(-process->process(), signal);
      if (signal != SIGTSTP && signal != SIGCONT) end_by(Clock::now() + kSignalGrace);
    }
  }

  // What runs then is killed. A later time does not postpone an earlier one.
  void end_by(Clock::time_point time) { kill_at_ = kill_at_ ? std::min(*kill_at_, time) : time; }

  void kill_all() {
    for (const auto& process : processes_) {
      if (!process->running()) continue;
      process->kill("it did not end in time");
      kill(-process->process(), SIGKILL);
    }
    kill_children();
  }

  int ranks_;
  Signals signals_;
  pid_t parent_;
  MeetingPoint meeting_;
  std::vector<char*> words_;  // of the command, and null
  std::vector<std::unique_ptr<RankProcess>> processes_;
  std::vector<RankFailure> failures_;
  std::optional<Clock::time_point> kill_at_;  // when what still runs is killed
};

// The launcher keeps two files open for each rank, and a rank up to four for each of the others.
rlim_t raise_file_limit(int ranks) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, 4 * static_cast<rlim_t>(ranks) + 256);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = wanted;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  return limit.rlim_cur;
}

}  // namespace

std::vector<RankFailure> run_job(int ranks, const std::vector<std::string>& command) {
  const rlim_t files = raise_file_limit(ranks);
  try {
    return Job(ranks, command).run();
  } catch (const SystemError& error) {
    if (error.error_number != EMFILE) throw;
    throw SystemError(fmt::format("{}: the limit is {}, and {} ranks need more than {}: raise it (ulimit -n)",
                                  error.what(), files, ranks, 2 * ranks),
                      EMFILE);
  }
}

}  // namespace ferry::app
