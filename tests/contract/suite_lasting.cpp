// The contract suite as devices play it, with ranks as processes that last, without devices.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuLastingProcesses, Contract,
                         testing::Values(Setup{BackendKind::cpu, RanksAre::lasting_processes}));

}  // namespace ferry::contract
