// The contract suite on the backend `collective`: ranks are threads that an engine of the tests connects, on
// one host and on two simulated ones.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CollectiveThreads, Contract,
                         testing::Values(Setup{BackendKind::collective, RankKind::engine_threads}));
// Not with sanitizers: only the group differs, and tests/runtime has its tests.
#ifndef __SANITIZE_ADDRESS__
INSTANTIATE_TEST_SUITE_P(CollectiveHosts, Contract,
                         testing::Values(Setup{BackendKind::collective, RankKind::engine_hosts}));
#endif

// On the memory of GPUs, with an engine that copies it, with one for host memory, and in two hops.
INSTANTIATE_TEST_SUITE_P(CudaCollective, Contract, testing::ValuesIn(device_collective_setups()));

}  // namespace ferry::contract
