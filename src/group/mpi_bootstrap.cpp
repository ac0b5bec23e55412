// The bootstrap of Group::mpi().
#include "group/launcher.hpp"
#include "group/mpi_library.hpp"

namespace ferry {

namespace {

void all_gather(const void* mine, void* all, std::size_t bytes) {
  const auto start = [&](ferry_mpi_operation** operation, char* message) {
    return open_mpi().start_all_gather(mine, all, bytes, operation, message);
  };
  run_mpi_operation(start, [] {});
}

}  // namespace

Bootstrap mpi_bootstrap() {
  const ferry_mpi& mpi = open_mpi();
  Bootstrap bootstrap;
  bootstrap.rank = mpi.rank;
  bootstrap.ranks = mpi.ranks;
  bootstrap.all_gather = all_gather;
  bootstrap.barrier = [] { all_gather(nullptr, nullptr, 0); };
  return bootstrap;
}

}  // namespace ferry
