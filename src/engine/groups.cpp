// The groups that bring an engine: Group::custom and Group::mpi.
#include <memory>
#include <utility>

#include "base/environment.hpp"
#include "base/text.hpp"
#include "engine/custom_engine.hpp"
#include "engine/mpi_engine.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "group/launcher.hpp"
#include "group/mpi_library.hpp"

namespace ferry {

Group Group::custom(Bootstrap bootstrap, EngineFunctions engine) {
  if (bootstrap.ranks < 1 || bootstrap.rank < 0 || bootstrap.rank >= bootstrap.ranks) {
    throw UsageError(
        str("rank ", bootstrap.rank, " does not exist in a group of ", counted(bootstrap.ranks, "rank")));
  }
  if (!bootstrap.all_gather || !bootstrap.barrier) {
    throw UsageError("Bootstrap::all_gather and Bootstrap::barrier must both be set");
  }
  const bool brings_engine = engine.all_to_all_v || engine.abort;
  const auto shared = std::make_shared<const Bootstrap>(std::move(bootstrap));
  return Group(launch_custom(
      {shared->rank, shared->ranks, shared->host_id.empty() ? Environment::read().host_id : shared->host_id,
       [shared] { return link_by_functions(shared); }},
      brings_engine ? make_custom_engine(std::move(engine)) : nullptr));
}

Group Group::mpi() {
  const ferry_mpi& mpi = open_mpi();
  return Group(launch_custom({mpi.rank, mpi.ranks, Environment::read().host_id, link_by_mpi, watch_mpi_group},
                             make_mpi_engine()));
}

}  // namespace ferry
