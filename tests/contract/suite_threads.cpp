// The contract suite with ranks as threads.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuThreads, Contract, testing::Values(Setup{BackendKind::cpu, RankKind::threads}));
// Not with sanitizers: tests/collective has every way in which threads of two hops meet.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
INSTANTIATE_TEST_SUITE_P(CpuThreadsInTwoHops, Contract,
                         testing::Values(Setup{
                             .rank_kind = RankKind::threads, .hops = Hops::two, .window = 7}));
#endif
INSTANTIATE_TEST_SUITE_P(CudaThreads, Contract, testing::ValuesIn(device_setups(RankKind::threads)));
INSTANTIATE_TEST_SUITE_P(CudaThreadsInTwoHops, Contract, testing::ValuesIn(relayed_device_setups()));

}  // namespace ferry::contract
