// Base class of the implementations of Group: each starts the ranks of the group, or joins it as one rank.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ferry/group.hpp"
#include "group/bootstrap_link.hpp"
#include "group/rank_state.hpp"

namespace ferry {

// How this process, or thread, reaches the ranks that it joins.
struct Connection {
  int rank, ranks;
  std::string host_id;  // name of the simulated host that the rank is on; empty: none
  std::function<std::unique_ptr<BootstrapLink>()>
      link;  // called by run() and join(), in the process of the rank
  void (*joined)(std::shared_ptr<const ControlBlock> control) = nullptr;  // called once the ranks have met
};

class Group::Launcher {
 public:
  // `engine`: the transport that the group brings for the backend `collective`; null: none.
  explicit Launcher(int ranks, std::shared_ptr<Engine> engine = nullptr)
      : ranks_(ranks), engine_(std::move(engine)) {}
  virtual ~Launcher() = default;
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int ranks() const { return ranks_; }
  double deadline() const { return deadline_; }
  void set_deadline(double seconds) { deadline_ = seconds; }

  // As Group::run.
  virtual void run(const std::function<void(Rank)>& body) = 0;

  // As Group::join.
  virtual Rank join();

 protected:
  // Runs `body` as one rank in the calling thread and records in the control block how it ended. Rethrows
  // what the body threw. A process forked in the body, which may end it too, records nothing.
  void run_rank(Membership membership, const std::function<void(Rank)>& body) const;

  // How messages of run() begin that pass on an error of that rank. Records of waits name the rank
  // themselves.
  static std::string prefix_of(int rank, ErrorRecord::Kind kind);

  // Joins as one rank. The rank leaves when its state is destroyed in the process that joined; copies in
  // forked processes do not count.
  std::shared_ptr<RankState> join_as(Membership membership) const;

 private:
  int ranks_;
  std::shared_ptr<Engine> engine_;
  double deadline_ = 30.0;
};

// The process of a rank that this process has forked. Kills and reaps it when it is destroyed, unless it was
// reaped before.
class RankProcess {
 public:
  // Throws SystemError if the process cannot be watched; it is killed and reaped then.
  RankProcess(int rank, pid_t process);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int rank() const { return rank_; }
  pid_t process() const { return process_; }
  int descriptor() const { return descriptor_; }  // readable once the process has ended
  bool running() const { return !status_; }

  // Whether a signal such as SIGSTOP has stopped the process.
  bool stopped() const;

  void kill(const std::string& why);
  bool killed_by_launcher() const { return !why_killed_.empty(); }
  const std::string& why_killed() const { return why_killed_; }

  // Blocks until the process has ended.
  void reap();

  // After reap(): how it ended, such as "rank 1 (process 4711) exited with status 3".
  std::string describe_exit() const;
  bool succeeded() const { return status_ && *status_ == 0; }
  bool signalled() const;  // it was killed by a signal

  // The process ended without leaving the group, and not because the launcher killed it.
  bool died() const { return died_; }
  void set_died() { died_ = true; }

 private:
  int rank_;
  pid_t process_;
  int descriptor_;
  std::string why_killed_;  // empty: not killed by the launcher
  bool died_ = false;
  std::optional<int> status_;  // of waitpid(), once it is reaped
};

std::shared_ptr<Group::Launcher> launch_threads(Topology topology);
// `fork_process` is called as fork(). Language bindings pass one that prepares their interpreter.
std::shared_ptr<Group::Launcher> launch_processes(Topology topology, pid_t (*fork_process)());
std::shared_ptr<Group::Launcher> launch_custom(Connection connection, std::shared_ptr<Engine> engine);

}  // namespace ferry
