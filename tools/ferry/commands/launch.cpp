// ferry launch: starts a program once for each rank on this host.
#include <fmt/core.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptors.hpp"
#include "base/errors.hpp"
#include "group/bootstrap_link.hpp"
#include "group/launcher.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/launch/meeting_point.hpp"

namespace ferry::app {

namespace {

// ---- the job: one process for each rank, on this host

struct RankFailure {
  std::string text;  // one line
  int status;        // its exit status; 128 + n if signal n killed it
};

// Blocks the signals that ask a job to end, stop or go on, and SIGCHLD, so that they can be read instead. A
// signal that the caller ignores, as nohup does, stays ignored. Processes that this one forks read theirs
// from a copy.
class Signals {
 public:
  Signals() {
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
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int descriptor() const { return file_.number(); }  // readable once a signal has come

  // Blocks until a signal comes, and returns it.
  int wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
    return signal;
  }
  // Takes a signal that has come; 0: none has.
  int next() const {
    signalfd_siginfo info{};
    return read(file_.number(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

  // Blocks what was blocked before.
  void restore() const { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }

 private:
  sigset_t set_{}, previous_{};
  FileDescriptor file_;
};

// Kills the children of this process. start_launcher() has made it adopt orphans among its descendants, so
// calling this until no child is left kills every process of the job.
void kill_children() {
  std::ifstream children(fmt::format("/proc/self/task/{}/children", getpid()));
  for (pid_t child = 0; children >> child;) kill(child, SIGKILL);
}

// Whether this process has children, ended ones that nobody has waited for included.
bool has_children() {
  siginfo_t ended{};
  return waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0;
}

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
    if (signal == SIGTSTP) ::raise(SIGSTOP);
  }
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  fmt::print(stderr, "ferry: the launcher (process {}) was killed by signal {}\n", launcher,
             WTERMSIG(status));
  end_job();
  _exit(128 + WTERMSIG(status));
}

// Forks, and returns in the new process: the launcher. The old one, which the caller knows, stays before it:
// it passes on signals and exits as the launcher does. If either is killed, the other ends the job. Only the
// old one belongs to the terminal, so Ctrl-C and Ctrl-Z reach the ranks once, through the launcher. Returns
// the old process, which launchers compare with getppid() when SIGCHLD comes.
// @throws SystemError  the system cannot fork
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

// Starts `command` once for each rank, with the environment variable that Group::launched() reads, and waits
// for all of them. Each rank leads a process group. When a rank fails, the others have 10 s to end by
// themselves; then they are killed, with all that the ranks have started. Signals are passed on to the ranks;
// after one that asks them to end they have 2 s. Does not return in the calling process, but in one that it
// forks. Returns the ranks that failed, the first to fail first; none if all exited with status 0. Throws
// SystemError if the command cannot be started.
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

// ---- the command

constexpr const char* kFooter = R"(Examples:
  ferry launch -n 4 ./program --its-option
  ferry launch -n 4 -- ./program --its-option  the same
  ferry launch -n 4 script.py                  a file that ends in .py is run by python3

The program makes its group with Group::launched(), in Python Group.launched(), in C ferry_group_launched().
When a rank fails, the others have 10 s to end; then they are killed, with all that the ranks have started.
Ctrl-C and other signals are passed on; after one that asks the ranks to end they have 2 s. The exit status is
that of the first rank that failed, or 128 + n if signal n killed it. Ranks on several hosts are started by
mpirun, torchrun or Slurm.
)";

struct LaunchOptions {
  int ranks = 0;  // 0: not given
};

bool is_script(const std::string& name) {
  return name.size() > 3 && name.compare(name.size() - 3, 3, ".py") == 0;
}

void launch(const LaunchOptions& options, std::vector<std::string> command) {
  if (!command.empty() && command.front() == "--") command.erase(command.begin());
  if (options.ranks == 0) {
    throw CLI::RequiredError("-n RANKS is required before PROGRAM: ferry launch -n 4 ./program",
                             CLI::ExitCodes::RequiredError);
  }
  if (command.empty()) throw CLI::RequiredError("PROGRAM");
  if (is_script(command.front())) command.insert(command.begin(), "python3");
  const std::vector<RankFailure> failures = run_job(options.ranks, command);
  if (failures.empty()) return;
  for (std::size_t i = 1; i < failures.size(); ++i) fmt::print(stderr, "ferry: {}\n", failures[i].text);
  throw ProgramFailed(failures.front().text, failures.front().status);
}

}  // namespace

void add_launch(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("launch", "Start PROGRAM [ARGUMENTS] once for each rank on this host");
  command->footer(kFooter);
  const auto options = std::make_shared<LaunchOptions>();
  command->add_option("-n,--ranks", options->ranks, "number of ranks, 1 to 1024; required")
      ->check(CLI::Range(1, 1024));
  command->prefix_command();  // everything after the options is passed to the program
  // What follows `--` goes to the parent in some versions of CLI11.
  command->preparse_callback([&program](std::size_t) { program.prefix_command(); });
  command->callback([command, &program, options] {
    launch(*options, command->remaining_size() > 0 ? command->remaining() : program.remaining());
  });
}

}  // namespace ferry::app
