#include "group/launcher.hpp"

#include <unistd.h>

#include <exception>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"

namespace ferry {

void Group::Launcher::run_rank(const std::shared_ptr<ControlBlock>& control, int rank,
                               const std::function<void(Rank)>& body) const {
  try {
    body(Rank(std::make_shared<RankState>(control, rank, topology_, deadline_, engine_)));
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
  throw UsageError("join: this group starts its ranks itself; use run(), which passes each rank to the body");
}

Rank Group::Launcher::join_as(const std::shared_ptr<ControlBlock>& control, int rank) const {
  const auto leave = [control, rank, process = getpid()](RankState* state) {
    delete state;
    if (getpid() == process) control->leave(rank);
  };
  try {
    return Rank(
        std::shared_ptr<RankState>(new RankState(control, rank, topology_, deadline_, engine_), leave));
  } catch (...) {
    control->fail_rank(rank, ErrorRecord::of(std::current_exception()), rank);
    throw;
  }
}

}  // namespace ferry
