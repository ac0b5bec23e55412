#include "group/launcher.hpp"

#include <unistd.h>

#include <exception>

#include "ferry/error.hpp"
#include "group/rank_state.hpp"

namespace ferry {

void Group::Launcher::run_rank(const std::shared_ptr<GroupControl>& control, int rank,
                               const std::function<void(Rank)>& body) const {
  try {
    body(Rank(std::make_shared<RankState>(control, rank, topology_, deadline_)));
  } catch (...) {
    control->lose(rank, ErrorRecord::of(std::current_exception()), rank);
    throw;
  }
  control->leave(rank);
}

Rank Group::Launcher::join() {
  throw UsageError("join: this group starts its ranks itself, and run() hands them to its body");
}

Rank Group::Launcher::enter(const std::shared_ptr<GroupControl>& control, int rank) const {
  const auto leave = [control, rank, process = getpid()](RankState* state) {
    delete state;
    if (getpid() == process) control->leave(rank);
  };
  try {
    return Rank(std::shared_ptr<RankState>(new RankState(control, rank, topology_, deadline_), leave));
  } catch (...) {
    control->lose(rank, ErrorRecord::of(std::current_exception()), rank);
    throw;
  }
}

}  // namespace ferry
