// Whether this build has the library's hooks for tests: fault injection in kernels.
#pragma once

namespace ferry::contract {

#if FERRY_TEST_HOOKS
inline constexpr bool kTestHooks = true;
#else
inline constexpr bool kTestHooks = false;
#endif

}  // namespace ferry::contract
