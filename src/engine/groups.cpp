// The groups that bring an engine: Group::custom and Group::mpi.
#include <string>
#include <utility>

#include "base/environment.hpp"
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
  const std::string host_id = bootstrap.host_id.empty() ? Environment::read().host_id : bootstrap.host_id;
  return Group(launch_custom(
      {bootstrap.rank, bootstrap.ranks, host_id, [bootstrap] { return link_by_functions(bootstrap); }},
      brings_engine ? make_custom_engine(std::move(engine)) : nullptr));
}

Group Group::mpi() {
  const Bootstrap mpi = mpi_bootstrap();
  return Group(launch_custom(
      {mpi.rank, mpi.ranks, Environment::read().host_id, [mpi] { return link_on_calling_thread(mpi); }},
      nullptr));
}

}  // namespace ferry
