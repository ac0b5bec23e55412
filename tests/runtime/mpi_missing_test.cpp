// Group::mpi() without its module says what it looked for, and where.
#include <gtest/gtest.h>

#include <cstdlib>

#include "runtime/channel_support.hpp"

namespace ferry::test {
namespace {

TEST(MpiModule, IsNamedWithItsPathWhenItIsMissing) {
  setenv("FERRY_MPI_MODULE", "/nowhere/libferry_mpi.so", 1);
  const auto error = thrown<UnsupportedError>([] { Group::mpi(); });
  check_text(error, "libferry_mpi.so");
  check_text(error, "/nowhere/libferry_mpi.so");
  check_text(error, "FERRY_MPI_MODULE");
}

TEST(MpiModule, ThatIsAnotherLibraryIsRefused) {
  setenv("FERRY_MPI_MODULE", "libm.so.6", 1);
  check_text(thrown<UnsupportedError>([] { Group::mpi(); }), "ferry_mpi_open");
}

}  // namespace
}  // namespace ferry::test
