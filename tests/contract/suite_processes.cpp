// The contract suite with ranks as processes.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuProcesses, Contract,
                         testing::Values(Setup{BackendKind::cpu, RankKind::processes}));
// Not with sanitizers: tests/collective has every way in which threads of two hops meet.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
INSTANTIATE_TEST_SUITE_P(CpuProcessesInTwoHops, Contract,
                         testing::Values(Setup{
                             .rank_kind = RankKind::processes, .hops = Hops::two, .window = 7}));
#endif
INSTANTIATE_TEST_SUITE_P(CudaProcesses, Contract,
                         testing::ValuesIn(device_setups(RankKind::persistent_processes)));

}  // namespace ferry::contract
