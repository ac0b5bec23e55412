// The contract suite on the CPU, with the persistent processes that device backends use.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CpuPersistentProcesses, Contract,
                         testing::Values(Setup{BackendKind::cpu, RankKind::persistent_processes}));

}  // namespace ferry::contract
