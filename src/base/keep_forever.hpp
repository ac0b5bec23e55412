// Memory that must never be freed, because a transport that was abandoned may still write to it.
#pragma once

#include <memory>

namespace ferry {

// Any thread.
void keep_forever(std::shared_ptr<void> memory);

}  // namespace ferry
