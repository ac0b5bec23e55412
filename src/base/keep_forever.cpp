#include "base/keep_forever.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace ferry {

void keep_forever(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  // Not destroyed at exit either: abandoned threads run until the process ends.
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace ferry
