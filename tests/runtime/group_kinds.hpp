// The kinds of groups that a test program covers. Threads and processes have separate programs, because the
// thread sanitizer follows only threads.
#pragma once

#include <array>

#include "runtime/support.hpp"

namespace ferry::test {

#ifdef FERRY_TEST_PROCESSES
inline constexpr std::array kGroupKinds = {GroupKind::processes, GroupKind::custom_processes};
#else
inline constexpr std::array kGroupKinds = {GroupKind::threads, GroupKind::custom_threads};
#endif

}  // namespace ferry::test
