// 256 ranks on 32 simulated nodes. many_ranks_long_test.cpp has 1,024.
#include "collective/many_ranks.hpp"

namespace ferry::contract {
namespace {

constexpr Setup kCollective{BackendKind::collective, RankKind::engine_threads};

TEST(ManyRanks, TwoHundredFiftySixInOneHop) {
  run_many_ranks(kCollective, many_ranks_case(256), Hops::one);
}

TEST(ManyRanks, TwoHundredFiftySixInTwoHops) {
  run_many_ranks(kCollective, many_ranks_case(256), Hops::two);
}

TEST(ManyRanks, TwoHundredFiftySixOnSharedMemory) {
  for (const BackendKind backend : {BackendKind::cpu, BackendKind::reference})
    run_many_ranks({backend, RankKind::threads}, many_ranks_case(256), Hops::one);
}

TEST(ManyRanks, TwoHundredFiftySixInTwoHopsOnSharedMemory) {
  run_many_ranks({.rank_kind = RankKind::threads, .window = 16}, many_ranks_case(256), Hops::two);
}

}  // namespace
}  // namespace ferry::contract
