// The contract suite as devices play it, with ranks as processes that last, without devices.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuPersistentProcesses, Contract,
                         testing::Values(Setup{BackendKind::cpu, RanksAre::persistent_processes}));

}  // namespace ferry::contract
