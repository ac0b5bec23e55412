// The Python classes Group and Rank.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "casters.hpp"
#include "ferry/config.hpp"
#include "ferry/group.hpp"

namespace ferry::python {

struct PyRank {
  Rank rank;
  int process;  // the process that it belongs to

  const Rank& checked() const;  // throws UsageError in a forked process
};

// How the ranks of a group are started.
enum class Starts { nothing, threads, processes };

class PyGroup {
 public:
  explicit PyGroup(Group group, MemoryKind memory = MemoryKind::host, Starts starts = Starts::nothing);

  const Group& group() const { return group_; }
  MemoryKind default_memory() const { return memory_; }
  void set_deadline(double seconds) { group_.set_deadline(seconds); }

  // Runs `body` as every rank that this process starts; returns the results in rank order.
  std::vector<nanobind::object> run(const nanobind::callable& body);

  // This process's rank. The first call is collective. The rank leaves the group once leave() was called and
  // no exchange uses it any more.
  PyRank join();
  void leave() { joined_.reset(); }

 private:
  Group group_;
  MemoryKind memory_;
  Starts starts_;
  int process_;
  std::optional<PyRank> joined_;
};

// How many ranks there are, or the nodes that they are on.
using Ranks = std::variant<int, Topology>;

// The topology of simulated nodes, if there are several: `nodes` of equal size, or those of a given topology.
Topology topology_of(const Ranks& ranks, int nodes);

// A group whose run() forks a process for each rank.
PyGroup make_processes(const Ranks& ranks, int nodes);

// Runs `body` in the processes of such a group; returns the results in rank order.
std::vector<nanobind::object> run_processes(Group group, const nanobind::callable& body);

// Adds to a Python exception which rank it is of, and its traceback if that is given. Python before 3.11 has
// no notes.
void note_rank(const nanobind::handle& exception, int rank, const std::string& traceback = "");

}  // namespace ferry::python
