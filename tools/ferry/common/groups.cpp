#include "tools/ferry/common/groups.hpp"

#include <fmt/core.h>

#include "ferry/error.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

Group mpi_group(int ranks) {
  Group group = Group::mpi();
  if (ranks == 0 || group.size() == ranks) return group;
  throw UsageError(fmt::format(
      "--backend collective: there {} {}: start ferry with mpirun -n {}, or pass --ranks {}",
      group.size() == 1 ? "is" : "are", report::counted(group.size(), "rank"), ranks, group.size()));
}

}  // namespace ferry::app
