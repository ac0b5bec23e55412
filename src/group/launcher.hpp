// Base class of the implementations of Group: each starts the ranks of the group, or joins it as one rank.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ferry/group.hpp"
#include "group/control_block.hpp"

namespace ferry {

class Engine;

class Group::Launcher {
 public:
  // `engine`: the transport that the group brings for the backend `collective`; null: none.
  explicit Launcher(Topology topology, std::shared_ptr<Engine> engine = nullptr)
      : topology_(std::move(topology)), engine_(std::move(engine)) {}
  virtual ~Launcher() = default;
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  const Topology& topology() const { return topology_; }
  int ranks() const { return topology_.ranks(); }
  double deadline() const { return deadline_; }
  void set_deadline(double seconds) { deadline_ = seconds; }

  // As Group::run.
  virtual void run(const std::function<void(Rank)>& body) = 0;

  // As Group::join.
  virtual Rank join();

 protected:
  // Runs `body` as one rank in the calling thread and records in the control block how it ended. Rethrows
  // what the body threw.
  void run_rank(const std::shared_ptr<ControlBlock>& control, int rank,
                const std::function<void(Rank)>& body) const;

  // How messages of run() begin that pass on an error of that rank. Records of waits name the rank
  // themselves.
  static std::string prefix_of(int rank, ErrorRecord::Kind kind);

  // Joins as one rank. The rank leaves when the last copy of the handle is destroyed in the process that
  // joined; copies in forked processes do not count.
  Rank join_as(const std::shared_ptr<ControlBlock>& control, int rank) const;

 private:
  Topology topology_;
  std::shared_ptr<Engine> engine_;
  double deadline_ = 30.0;
};

std::shared_ptr<Group::Launcher> launch_threads(Topology topology);
std::shared_ptr<Group::Launcher> launch_processes(Topology topology);
std::shared_ptr<Group::Launcher> launch_custom(Bootstrap bootstrap, std::shared_ptr<Engine> engine);

// The bootstrap of open_mpi(), with the same errors. Collective over all processes of the MPI job.
Bootstrap mpi_bootstrap();

}  // namespace ferry
