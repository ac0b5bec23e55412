// How the ranks of a group are started.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "ferry/group.hpp"
#include "group/control_block.hpp"

namespace ferry {

class Group::Launcher {
 public:
  explicit Launcher(Topology topology) : topology_(topology) {}
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
  // Runs `body` as one rank, in the calling thread, and tells the others how it ended. Throws what the body
  // threw.
  void run_rank(const std::shared_ptr<GroupControl>& control, int rank,
                const std::function<void(Rank)>& body) const;

  // Enters as one rank, which leaves with the last copy of the handle: not in a process forked meanwhile.
  Rank enter(const std::shared_ptr<GroupControl>& control, int rank) const;

 private:
  Topology topology_;
  double deadline_ = 30.0;
};

std::shared_ptr<Group::Launcher> launch_threads(Topology topology);
std::shared_ptr<Group::Launcher> launch_processes(Topology topology);
std::shared_ptr<Group::Launcher> launch_custom(Bootstrap bootstrap);

// Where the MPI module is looked for, in this order.
std::vector<std::filesystem::path> mpi_module_places();

// Finds and loads the MPI module; UnsupportedError if there is none.
Bootstrap mpi_bootstrap();

}  // namespace ferry
