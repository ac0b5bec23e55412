// The contract suite on the backend `collective`: ranks are threads that an engine of the tests connects.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(CollectiveThreads, Contract,
                         testing::Values(Setup{BackendKind::collective, RankKind::engine_threads}));

}  // namespace ferry::contract
