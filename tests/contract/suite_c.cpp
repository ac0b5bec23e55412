// The contract suite through the C interface, with ranks as threads.
#include "harness/harness.hpp"

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(C, Contract, testing::Values(Setup{.language = &kC}));

}  // namespace ferry::contract
