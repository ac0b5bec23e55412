#include "group/launcher.hpp"

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
#include <exception>
#include <iostream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "base/callback_thread.hpp"
#include "base/errors.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/rendezvous.hpp"
#include "group/waiter.hpp"

namespace ferry {

void Group::Launcher::run_rank(Membership membership, const std::function<void(Rank)>& body) const {
  const std::shared_ptr<ControlBlock> control = membership.control;
  const int rank = membership.rank;
  const auto destroy = [](RankState* state) {
    if (state->in_own_process()) delete state;
  };
  try {
    body(Rank({new RankState(std::move(membership), deadline_, engine_), destroy}));
  } catch (...) {
    control->fail_rank(rank, ErrorRecord::of(std::current_exception()), rank);
    throw;
  }
  control->leave(rank);
}

std::string Group::Launcher::prefix_of(int rank, ErrorRecord::Kind kind) {
  const bool of_a_wait = kind == ErrorRecord::Kind::timeout || kind == ErrorRecord::Kind::peer_lost;
  return of_a_wait ? "" : str("rank ", rank, ": ");
}

Rank Group::Launcher::join() {
  throw UsageError(
      "a group of threads or processes has no rank outside run(): call run(body), and use the rank that the "
      "body gets");
}

std::shared_ptr<RankState> Group::Launcher::join_as(Membership membership) const {
  const std::shared_ptr<ControlBlock> control = membership.control;
  const int rank = membership.rank;
  const auto leave = [control, rank](RankState* state) {
    if (!state->in_own_process()) return;
    delete state;
    control->leave(rank);
  };
  try {
    return {new RankState(std::move(membership), deadline_, engine_), leave};
  } catch (...) {
    control->fail_rank(rank, ErrorRecord::of(std::current_exception()), rank);
    throw;
  }
}

namespace {

// Group::threads: every rank is a thread of this process.
class ThreadLauncher : public Group::Launcher {
 public:
  explicit ThreadLauncher(Topology topology) : Launcher(topology.ranks()), topology_(std::move(topology)) {}

  void run(const std::function<void(Rank)>& body) override {
    const auto control =
        std::make_shared<ControlBlock>(Mapping::anonymous_shared(ControlBlock::bytes(ranks())), ranks());
    std::vector<std::exception_ptr> errors(ranks());
    std::vector<std::thread> threads;
    try {
      for (int rank = 0; rank < ranks(); ++rank) {
        threads.emplace_back([&, rank] {
          try {
            run_rank({control, rank, topology_}, body);
          } catch (...) {
            errors[rank] = std::current_exception();
          }
        });
      }
    } catch (const std::system_error& error) {
      const int not_started = static_cast<int>(threads.size());
      const SystemError reason(str("cannot start the thread of rank ", not_started, ": ", error.what()),
                               error.code().value());
      control->fail_rank(not_started, ErrorRecord::of(reason), control->launcher());
      errors[not_started] = std::make_exception_ptr(reason);
    }
    for (std::thread& thread : threads) thread.join();
    const int first_failed = control->first_failed_rank();
    if (first_failed >= 0) rethrow(first_failed, errors[first_failed]);
  }

 private:
  // As in a group of processes, an exception of a class that Ferry does not know becomes a
  // std::runtime_error.
  [[noreturn]] static void rethrow(int rank, const std::exception_ptr& error) {
    const ErrorRecord record = ErrorRecord::of(error);
    const std::string prefix = prefix_of(rank, record.kind);
    try {
      std::rethrow_exception(error);
    } catch (const Error& known) {
      record.raise_with(prefix + known.what());
    } catch (const std::exception& other) {
      std::throw_with_nested(std::runtime_error(prefix + other.what()));
    } catch (...) {
      std::throw_with_nested(std::runtime_error(prefix + record.text));
    }
  }

  Topology topology_;
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_threads(Topology topology) {
  return std::make_shared<ThreadLauncher>(std::move(topology));
}

namespace {

// Group::custom and Group::mpi: this process, or thread, is one rank, and the others are found over a link.
class CustomLauncher : public Group::Launcher {
 public:
  CustomLauncher(Connection connection, std::shared_ptr<Engine> engine)
      : Launcher(connection.ranks, std::move(engine)), connection_(std::move(connection)) {}

  void run(const std::function<void(Rank)>& body) override { run_rank(rendezvous(), body); }

  Rank join() override {
    const std::shared_ptr<RankState> state = join_as(rendezvous());
    joined_ = state;
    return Rank(state);
  }

 private:
  // Collective over all ranks.
  Membership rendezvous() {
    if (process_ == 0) process_ = this_process();
    require_own_process("group", process_);
    CallbackScope::require_none("Group::run or Group::join");
    if (!joined_.expired()) {
      throw UsageError(
          str("rank ", connection_.rank, " is in the group already: use the handle that join() returned"));
    }
    std::unique_ptr<BootstrapLink> link = connection_.link();
    Meeting meeting = meet(*link, connection_.rank, connection_.ranks, connection_.host_id, deadline());
    if (connection_.joined != nullptr) connection_.joined(meeting.control);
    if (meeting.topology.nodes() == 1) link = nullptr;
    return {std::move(meeting.control), connection_.rank, std::move(meeting.topology), std::move(link)};
  }

  Connection connection_;
  int process_ = 0;  // the first process that joined; 0: none
  std::weak_ptr<RankState> joined_;
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_custom(Connection connection, std::shared_ptr<Engine> engine) {
  return std::make_shared<CustomLauncher>(std::move(connection), std::move(engine));
}

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

namespace {

using Clock = std::chrono::steady_clock;

// After a failure of the group, survivors have its deadline and this long to end before they are killed.
constexpr double kGraceSeconds = 2.0;
// A stopped process has less: it cannot end.
constexpr double kStoppedGraceSeconds = 0.5;
constexpr int kPollMilliseconds = 50;

// Group::processes: forks a process for every rank, and reaps it.
class ProcessLauncher : public Group::Launcher {
 public:
  ProcessLauncher(Topology topology, pid_t (*fork_process)())
      : Launcher(topology.ranks()), topology_(std::move(topology)), fork_process_(fork_process) {}

  void run(const std::function<void(Rank)>& body) override {
    const auto control =
        std::make_shared<ControlBlock>(Mapping::anonymous_shared(ControlBlock::bytes(ranks())), ranks());
    std::vector<std::unique_ptr<RankProcess>> children;
    for (int rank = 0; rank < ranks(); ++rank) children.push_back(start(control, rank, body));
    wait_for_all(children, *control);
    throw_rank_error(children, *control);
  }

 private:
  std::unique_ptr<RankProcess> start(const std::shared_ptr<ControlBlock>& control, int rank,
                                     const std::function<void(Rank)>& body) const {
    // Flushes first: otherwise every child would write the buffered output again.
    std::fflush(nullptr);
    std::cout.flush();
    const pid_t parent = getpid();
    const pid_t process = fork_process_();
    if (process < 0) throw system_error(str("cannot fork the process of rank ", rank), errno);
    if (process == 0) run_child(parent, control, rank, body);
    return std::make_unique<RankProcess>(rank, process);
  }

  [[noreturn]] void run_child(pid_t parent, const std::shared_ptr<ControlBlock>& control, int rank,
                              const std::function<void(Rank)>& body) const {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // the parent ended before prctl()
    int status = 0;
    try {
      run_rank({control, rank, topology_}, body);
    } catch (...) {
      status = 1;  // run_rank() recorded the error; run() throws it in the parent
    }
    std::cout.flush();
    std::fflush(nullptr);
    _exit(status);  // skips the exit handlers, which belong to the parent
  }

  // Returns when every process has been reaped. After a failure of the group, kills those that do not end.
  void wait_for_all(std::vector<std::unique_ptr<RankProcess>>& children, ControlBlock& control) const {
    std::optional<Clock::time_point> failed_at;
    while (true) {
      std::vector<pollfd> entries;
      std::vector<RankProcess*> running;
      for (const auto& child : children) {
        if (!child->running()) continue;
        entries.push_back({child->descriptor(), POLLIN, 0});
        running.push_back(child.get());
      }
      if (running.empty()) return;
      poll(entries.data(), entries.size(), kPollMilliseconds);
      for (std::size_t i = 0; i < running.size(); ++i) {
        if (entries[i].revents != 0) handle_exit(*running[i], control);
      }
      const auto interrupted = interrupt_requested.load();
      if (interrupted != nullptr && interrupted()) {
        control.fail(control.launcher(),
                     failure_record(ErrorRecord::Kind::peer_lost, {}, "the launcher was interrupted"));
        for (RankProcess* child : running) {
          if (child->running()) child->kill("the launcher was interrupted");
        }
      }
      if (!failed_at && control.failed()) failed_at = Clock::now();
      if (!failed_at) continue;
      const double since_failure = std::chrono::duration<double>(Clock::now() - *failed_at).count();
      for (RankProcess* child : running) {
        if (child->running()) kill_if_late(*child, control.failure(), since_failure);
      }
    }
  }

  void kill_if_late(RankProcess& child, const ErrorRecord& failure, double since_failure) const {
    // A rank that let the others wait for the whole deadline has used up its own.
    const bool late = failure.kind == ErrorRecord::Kind::timeout && failure.wait.peer == child.rank();
    const double grace = late ? kGraceSeconds : deadline() + kGraceSeconds;
    if (since_failure > kStoppedGraceSeconds && child.stopped()) {
      child.kill("it was stopped");
    } else if (since_failure > grace) {
      child.kill(str("it did not end within ", grace, " s of the group's failure"));
    }
  }

  static void handle_exit(RankProcess& child, ControlBlock& control) {
    child.reap();
    const RankStatus status = control.status_of(child.rank());
    if (status == RankStatus::left || status == RankStatus::failed || child.killed_by_launcher()) return;
    child.set_died();
    WaitRecord record;
    record.rank = record.peer = child.rank();
    control.fail_rank(
        child.rank(),
        failure_record(ErrorRecord::Kind::peer_lost, record,
                       str(child.describe_exit(), child.signalled() ? "" : " instead of returning")),
        control.launcher());
  }

  void throw_rank_error(const std::vector<std::unique_ptr<RankProcess>>& children,
                        const ControlBlock& control) const {
    const int first_failed = control.first_failed_rank();
    if (first_failed >= 0) {
      const ErrorRecord error = control.error_of(first_failed);
      // If a survivor noticed the death of a process first, throws the launcher's own record of that death,
      // which names the signal.
      const bool caused_by_death = error.kind == ErrorRecord::Kind::peer_lost && error.wait.peer >= 0 &&
                                   children[error.wait.peer]->died();
      if (caused_by_death) control.error_of(error.wait.peer).raise();
      error.raise(prefix_of(first_failed, error.kind));
    }
    for (const auto& child : children) {
      if (!child->killed_by_launcher()) continue;
      control.failure().raise(str("rank ", child->rank(), " was killed because ", child->why_killed(), ": "));
    }
  }

  Topology topology_;
  pid_t (*fork_process_)();
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_processes(Topology topology, pid_t (*fork_process)()) {
  return std::make_shared<ProcessLauncher>(std::move(topology), fork_process);
}

}  // namespace ferry
