#include "runtime/support.hpp"

namespace ferry::test {

const std::array<GroupKind, 2> kGroupKinds = {GroupKind::threads, GroupKind::custom_threads};

}  // namespace ferry::test
