#include "core/launcher.hpp"

#include <exception>

#include "core/rank_state.hpp"

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

}  // namespace ferry
