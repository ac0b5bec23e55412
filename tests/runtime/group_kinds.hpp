// The kinds of groups a test program covers: threads and processes are tested by programs of their own, since
// the thread sanitizer follows only the former.
#pragma once

#include <array>

#include "runtime/support.hpp"

namespace ferry::test {

#ifdef FERRY_TEST_PROCESSES
inline constexpr std::array kKinds = {Kind::processes, Kind::custom_processes};
#else
inline constexpr std::array kKinds = {Kind::threads, Kind::custom_threads};
#endif

}  // namespace ferry::test
