// The contract suite with ranks as processes that mpirun has started. Every process runs the same tests; a
// test skips itself if it needs another number of ranks.
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "group/mpi_library.hpp"
#include "harness/harness.hpp"
#include "seed.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CollectiveMpi, Contract,
                         testing::Values(Setup{BackendKind::collective, RankKind::mpi}));
INSTANTIATE_TEST_SUITE_P(Nccl, Contract, testing::ValuesIn(nccl_setups()));
INSTANTIATE_TEST_SUITE_P(Nvshmem, Contract, testing::ValuesIn(nvshmem_setups()));

namespace {

// Prints failures only.
class FailurePrinter : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (part.failed()) std::cerr << str("rank ", open_mpi().rank, ": ", part) << std::flush;
  }
};

// All ranks draw the same cases: with the seed of rank 0.
void share_seed() {
  const std::uint64_t mine = test::draw_seed();
  std::vector<std::uint64_t> seeds(open_mpi().ranks);
  const auto start = [&](ferry_mpi_operation** operation, char* message) {
    return open_mpi().start_all_gather(&mine, seeds.data(), sizeof mine, operation, message);
  };
  run_mpi_operation(start, [] {});
  setenv("FERRY_SEED", std::to_string(seeds[0]).c_str(), 1);
}

// Rank 0 prints the tests and their results.
void be_quiet() {
  testing::TestEventListeners& all = testing::UnitTest::GetInstance()->listeners();
  delete all.Release(all.default_result_printer());
  delete all.Release(all.default_xml_generator());
  all.Append(new FailurePrinter);
}

}  // namespace
}  // namespace ferry::contract

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  ferry::contract::share_seed();
  if (ferry::open_mpi().rank > 0) ferry::contract::be_quiet();
  const int failed = RUN_ALL_TESTS();
  ferry::contract::disconnect_mpi_process();
  return failed;
}
