#include "ferry/group.hpp"

#include <unistd.h>

#include <cmath>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/launcher.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace {

// The nodes of `topology`; several nodes are simulated.
Topology simulated_nodes(const Topology& topology) {
  if (topology.ranks() < 1) throw UsageError("the topology of a group needs at least one rank");
  std::vector<int> labels;
  for (int rank = 0; rank < topology.ranks(); ++rank) labels.push_back(topology.node_of(rank));
  return Topology(labels, topology.nodes() > 1);
}

}  // namespace

int Rank::index() const {
  return state_->index();
}

int Rank::size() const {
  return state_->topology().ranks();
}

const Topology& Rank::topology() const {
  return state_->topology();
}

bool Rank::same_process() const {
  return state_->same_process();
}

void Rank::all_gather(const void* mine, void* all, std::size_t bytes) const {
  state_->all_gather(mine, all, bytes);
}

void Rank::barrier() const {
  state_->all_gather(nullptr, nullptr, 0);
}

Group Group::threads(int ranks, int nodes) {
  return threads(Topology::blocks(ranks, nodes));
}

Group Group::threads(const Topology& topology) {
  return Group(launch_threads(simulated_nodes(topology)));
}

Group Group::processes(int ranks, int nodes) {
  return processes(Topology::blocks(ranks, nodes));
}

Group Group::processes(const Topology& topology) {
  return Group(launch_processes(simulated_nodes(topology), fork));
}

int Group::size() const {
  return launcher_->ranks();
}

void Group::run(const std::function<void(Rank)>& body) {
  if (!body) throw UsageError("run: the body is empty");
  launcher_->run(body);
}

Rank Group::join() {
  return launcher_->join();
}

void Group::set_deadline(double seconds) {
  if (!(seconds > 0) || !std::isfinite(seconds)) {
    throw UsageError(str("a deadline must be a positive number of seconds, not ", seconds));
  }
  launcher_->set_deadline(seconds);
}

}  // namespace ferry
