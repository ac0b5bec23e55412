#include "tools/ferry/common/groups.hpp"

#include <fmt/core.h>

#include "ferry/error.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

Group mpi_group(int ranks, const std::string& backend) {
  Group group = Group::mpi();
  if (ranks == 0 || group.size() == ranks) return group;
  throw UsageError(fmt::format("--backend {}: there {} {}: start ferry with mpirun -n {}, or pass --ranks {}",
                               backend, group.size() == 1 ? "is" : "are",
                               report::counted(group.size(), "rank"), ranks, group.size()));
}

Group local_group(const LocalGroup& options) {
  const auto& [ranks, hosts, processes] = options;
  if (ranks % hosts != 0) throw UsageError(fmt::format("--hosts {}: must divide --ranks {}", hosts, ranks));
  return processes ? Group::processes(ranks, hosts) : Group::threads(ranks, hosts);
}

void refuse_local_options(const LocalGroup& options) {
  if (!options.processes && options.hosts == 1) return;
  throw UsageError(fmt::format(
      "{} with --backend collective: its ranks are the processes that mpirun has started; to simulate "
      "hosts, give them different values of FERRY_HOST_ID",
      options.processes ? "--processes" : "--hosts"));
}

}  // namespace ferry::app
