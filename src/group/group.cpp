#include "ferry/group.hpp"

#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "base/callback_thread.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/topology.hpp"
#include "group/launcher.hpp"
#include "group/rank_state.hpp"

namespace ferry {

Topology::Topology(const std::vector<int>& labels, bool simulated) : simulated_(simulated) {
  std::map<int, int> nodes;  // by label, numbered as their first ranks come
  for (std::size_t rank = 0; rank < labels.size(); ++rank) {
    const int node = nodes.try_emplace(labels[rank], static_cast<int>(nodes.size())).first->second;
    ranks_of_.resize(nodes.size());
    std::vector<int>& members = ranks_of_[static_cast<std::size_t>(node)];
    node_of_.push_back(node);
    local_rank_of_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(rank));
  }
}

Topology Topology::blocks(int ranks, int nodes, bool simulated) {
  if (ranks < 1) throw UsageError(str("a group needs at least one rank, not ", ranks));
  if (nodes < 1 || ranks % nodes != 0) {
    throw UsageError(
        str("nodes = ", nodes, ", must divide the ", counted(ranks, "rank"), " into nodes of equal size"));
  }
  std::vector<int> labels;
  for (int rank = 0; rank < ranks; ++rank) labels.push_back(rank / (ranks / nodes));
  return Topology(labels, simulated);
}

RankState::RankState(Membership membership, double deadline, std::shared_ptr<Engine> engine)
    : control_(std::move(membership.control)),
      rank_(membership.rank),
      topology_(std::move(membership.topology)),
      deadline_(deadline),
      engine_(std::move(engine)),
      one_host_(membership.link == nullptr),
      waiter_(*control_, rank_,
              one_host_ ? topology_.ranks()
                        : static_cast<int>(topology_.ranks_of(topology_.node_of(rank_)).size())) {
  plane_ = make_control_plane(*control_, waiter_, rank_, topology_, deadline, std::move(membership.link));
  control_->join(rank_);
  all_gather(nullptr, nullptr, 0);
  for (int peer = 0; peer < control_->ranks(); ++peer)
    same_process_ &= control_->process_of(peer) == getpid();
  if (!same_process_) liveness_lock_.emplace(control_->liveness_lock(rank_));
  if (log_enabled()) {
    log_line(str("rank ", rank_, " of ", topology_.ranks(), " has joined: process ", getpid(),
                 ", local rank ", topology_.local_rank_of(rank_), " of node ", topology_.node_of(rank_),
                 ", nodes ", topology_.nodes(), topology_.simulated() ? " (simulated)" : ""));
  }
}

void RankState::all_gather(const void* mine, void* all, std::size_t bytes) {
  require_own_process("rank");
  CallbackScope::require_none("a collective of the group");
  plane_->all_gather(mine, all, bytes);
}

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
