#include "runtime/support.hpp"

namespace ferry::test {

const std::array<GroupKind, 2> kGroupKinds = {GroupKind::processes, GroupKind::custom_processes};

}  // namespace ferry::test
