#include "group/launcher.hpp"

#include <exception>
#include <utility>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

void Group::Launcher::run_rank(Membership membership, const std::function<void(Rank)>& body) const {
  const std::shared_ptr<ControlBlock> control = membership.control;
  const int rank = membership.rank;
  const auto destroy = [](RankState* state) {
    if (state->in_own_process()) delete state;
  };
  try {
    body(Rank({new RankState(std::move(membership), deadline_, engine_), destroy}));
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

std::shared_ptr<RankState> Group::Launcher::join_as(Membership membership) const {
  const std::shared_ptr<ControlBlock> control = membership.control;
  const int rank = membership.rank;
  const auto leave = [control, rank](RankState* state) {
    if (!state->in_own_process()) return;
    delete state;
    control->leave(rank);
  };
  try {
    return {new RankState(std::move(membership), deadline_, engine_), leave};
  } catch (...) {
    control->fail_rank(rank, ErrorRecord::of(std::current_exception()), rank);
    throw;
  }
}

}  // namespace ferry
