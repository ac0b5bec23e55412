#include "tools/ferry/launch/job.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <optional>

#include "base/os/file_descriptor.hpp"
#include "base/system_error.hpp"
#include "group/launch_protocol.hpp"
#include "group/rank_process.hpp"
#include "tools/ferry/launch/meeting_point.hpp"

namespace ferry::app {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kGrace(10);       // for the other ranks, after one has failed
constexpr std::chrono::seconds kSignalGrace(2);  // after SIGINT or SIGTERM

// Blocks SIGINT and SIGTERM, and reads them from a file instead.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set_, &previous_);
    file_ = FileDescriptor(signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!file_.valid()) throw system_error("cannot watch for signals", errno);
  }
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int descriptor() const { return file_.number(); }
  void restore() const { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }

  // The signal that has come, or 0.
  int next() const {
    signalfd_siginfo info{};
    return read(file_.number(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t set_{}, previous_{};
  FileDescriptor file_;
};

class Job {
 public:
  Job(int ranks, const std::vector<std::string>& command) : ranks_(ranks), meeting_(ranks) {
    for (const std::string& word : command) words_.push_back(const_cast<char*>(word.c_str()));
    words_.push_back(nullptr);
    for (int rank = 0; rank < ranks; ++rank) processes_.push_back(start(rank));
  }

  std::vector<std::string> wait() {
    while (running() > 0) {
      std::vector<pollfd> entries{{signals_.descriptor(), POLLIN, 0}};
      for (const auto& process : processes_) {
        if (process->running()) entries.push_back({process->descriptor(), POLLIN, 0});
      }
      meeting_.add_to(entries);
      constexpr int kPollMilliseconds = 100;
      poll(entries.data(), entries.size(), kill_at_ ? kPollMilliseconds : -1);
      reap_ended();
      meeting_.serve();
      pass_on_signals();
      if (kill_at_ && Clock::now() >= *kill_at_) {
        for (const auto& process : processes_)
          if (process->running()) process->kill("it did not end in time");
      }
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

  int running() const {
    int count = 0;
    for (const auto& process : processes_) count += process->running() ? 1 : 0;
    return count;
  }

  void reap_ended() {
    for (const auto& process : processes_) {
      pollfd entry{process->descriptor(), POLLIN, 0};
      if (!process->running() || poll(&entry, 1, 0) == 0) continue;
      process->reap();
      meeting_.set_lost(process->rank(), process->describe_exit());
      if (process->succeeded()) continue;
      const std::string why = process->killed_by_launcher() ? ", because " + process->why_killed() : "";
      failures_.push_back(process->describe_exit() + why);
      if (!kill_at_) kill_at_ = Clock::now() + kGrace;
    }
  }

  void pass_on_signals() {
    while (const int signal = signals_.next()) {
      for (const auto& process : processes_)
        if (process->running()) ::kill(process->process(), signal);
      kill_at_ = Clock::now() + kSignalGrace;
    }
  }

  int ranks_;
  Signals signals_;
  MeetingPoint meeting_;
  std::vector<char*> words_;  // of the command, and null
  std::vector<std::unique_ptr<RankProcess>> processes_;
  std::vector<std::string> failures_;
  std::optional<Clock::time_point> kill_at_;  // when ranks that still run are killed
};

}  // namespace

std::vector<std::string> run_job(int ranks, const std::vector<std::string>& command) {
  return Job(ranks, command).wait();
}

}  // namespace ferry::app
