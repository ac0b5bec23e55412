#include "ferry/group.hpp"

#include <unistd.h>

#include <cmath>
#include <utility>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/launcher.hpp"
#include "group/rank_state.hpp"

namespace ferry {

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
  return Group(launch_threads(Topology::blocks(ranks, nodes, nodes > 1)));
}

Group Group::processes(int ranks, int nodes) {
  return Group(launch_processes(Topology::blocks(ranks, nodes, nodes > 1), fork));
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
