// The contract suite with ranks as threads.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuThreads, Contract, testing::Values(Setup{BackendKind::cpu, RankKind::threads}));
INSTANTIATE_TEST_SUITE_P(CpuThreadsInTwoHops, Contract,
                         testing::Values(Setup{.rank_kind = RankKind::threads, .hops = Hops::two}));
INSTANTIATE_TEST_SUITE_P(ReferenceThreads, Contract,
                         testing::Values(Setup{BackendKind::reference, RankKind::threads}));
INSTANTIATE_TEST_SUITE_P(CudaThreads, Contract, testing::ValuesIn(device_setups(RankKind::threads)));

}  // namespace ferry::contract
