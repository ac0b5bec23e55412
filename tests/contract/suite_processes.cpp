// The contract suite with ranks as processes.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuProcesses, Contract,
                         testing::Values(Setup{BackendKind::cpu, RanksAre::processes}));
INSTANTIATE_TEST_SUITE_P(ReferenceProcesses, Contract,
                         testing::Values(Setup{BackendKind::reference, RanksAre::processes}));
INSTANTIATE_TEST_SUITE_P(CudaProcesses, Contract,
                         testing::ValuesIn(device_setups(RanksAre::persistent_processes)));

}  // namespace ferry::contract
