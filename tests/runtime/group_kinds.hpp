// The kinds of groups that a test program covers. Threads and processes have separate programs, because the
// thread sanitizer follows only threads: kinds_threads.cpp or kinds_processes.cpp is linked.
#pragma once

#include <array>

#include "runtime/support.hpp"

namespace ferry::test {

extern const std::array<GroupKind, 2> kGroupKinds;

}  // namespace ferry::test
