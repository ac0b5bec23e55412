// The contract suite with ranks as processes.
#include "contract/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuProcesses, Contract, testing::Values(Setup{BackendKind::cpu, true}));
INSTANTIATE_TEST_SUITE_P(ReferenceProcesses, Contract, testing::Values(Setup{BackendKind::reference, true}));
INSTANTIATE_TEST_SUITE_P(CudaProcesses, Contract, testing::ValuesIn(device_setups(true)));

}  // namespace ferry::contract
