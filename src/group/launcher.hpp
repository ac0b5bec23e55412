// Base class of the implementations of Group: each starts the ranks of the group, or joins it as one rank.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
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

std::shared_ptr<Group::Launcher> launch_threads(Topology topology);
// `fork_process` is called as fork(). Language bindings pass one that prepares their interpreter.
std::shared_ptr<Group::Launcher> launch_processes(Topology topology, pid_t (*fork_process)());
std::shared_ptr<Group::Launcher> launch_custom(Connection connection, std::shared_ptr<Engine> engine);

}  // namespace ferry
