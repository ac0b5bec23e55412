// The groups that bring an engine: Group::custom and Group::mpi.
#include <utility>

#include "base/text.hpp"
#include "engine/custom_engine.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "group/launcher.hpp"

namespace ferry {

Group Group::custom(Bootstrap bootstrap, EngineFunctions engine) {
  if (bootstrap.ranks < 1 || bootstrap.rank < 0 || bootstrap.rank >= bootstrap.ranks) {
    throw UsageError(
        str("rank ", bootstrap.rank, " does not exist in a group of ", bootstrap.ranks, " ranks"));
  }
  if (!bootstrap.all_gather || !bootstrap.barrier) {
    throw UsageError("Bootstrap::all_gather and Bootstrap::barrier must both be set");
  }
  const bool brings_engine = engine.all_to_all_v || engine.abort;
  return Group(
      launch_custom(std::move(bootstrap), brings_engine ? make_custom_engine(std::move(engine)) : nullptr));
}

Group Group::mpi() {
  return Group(launch_custom(mpi_bootstrap(), nullptr));
}

}  // namespace ferry
