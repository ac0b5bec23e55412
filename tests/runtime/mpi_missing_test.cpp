// Group::mpi() without a usable MPI module.
#include <gtest/gtest.h>

#include <cstdlib>

#include "runtime/channel_support.hpp"

namespace ferry::test {
namespace {

TEST(MpiModule, IsNamedWithItsPathIfItIsMissing) {
  setenv("FERRY_MPI_MODULE", "/nowhere/libferry_mpi.so", 1);
  const auto error = expect_thrown<UnsupportedError>([] { Group::mpi(); });
  require_text(error, "libferry_mpi.so");
  require_text(error, "/nowhere/libferry_mpi.so");
  require_text(error, "FERRY_MPI_MODULE");
}

TEST(MpiModule, IsRefusedIfItIsAnotherLibrary) {
  setenv("FERRY_MPI_MODULE", "libm.so.6", 1);
  require_text(expect_thrown<UnsupportedError>([] { Group::mpi(); }), "ferry_mpi_open");
}

}  // namespace
}  // namespace ferry::test
