// Group::mpi() without a usable MPI module.
#include <gtest/gtest.h>

#include <cstdlib>

#include "runtime/channel_support.hpp"

namespace ferry::test {
namespace {

TEST(MpiModule, IsNamedWithItsPathIfItIsMissing) {
  setenv("FERRY_MPI_MODULE", "/nowhere/libferry_mpi.so", 1);
  const auto error = thrown<UnsupportedError>([] { Group::mpi(); });
  check_text(error, "libferry_mpi.so");
  check_text(error, "/nowhere/libferry_mpi.so");
  check_text(error, "FERRY_MPI_MODULE");
}

TEST(MpiModule, IsRefusedIfItIsAnotherLibrary) {
  setenv("FERRY_MPI_MODULE", "libm.so.6", 1);
  check_text(thrown<UnsupportedError>([] { Group::mpi(); }), "ferry_mpi_open");
}

}  // namespace
}  // namespace ferry::test
