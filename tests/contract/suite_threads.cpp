// The contract suite with ranks as threads.
#include "contract/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuThreads, Contract, testing::Values(Setup{BackendKind::cpu, false}));
INSTANTIATE_TEST_SUITE_P(ReferenceThreads, Contract, testing::Values(Setup{BackendKind::reference, false}));
INSTANTIATE_TEST_SUITE_P(CudaThreads, Contract, testing::ValuesIn(device_setups(false)));

}  // namespace ferry::contract
