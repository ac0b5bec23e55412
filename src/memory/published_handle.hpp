// Shared ownership, handed by one thread to others of the process.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace ferry {

// While an offer lasts, other threads may take the object by its address. A thread that is late finds nothing
// instead of an object that is gone.
template <class T>
class PublishedHandle {
 public:
  explicit PublishedHandle(std::shared_ptr<T> object) : object_(std::move(object)) {
    const std::lock_guard lock(mutex_);
    offered_[object_.get()] = object_;
  }
  ~PublishedHandle() {
    const std::lock_guard lock(mutex_);
    offered_.erase(object_.get());
  }
  PublishedHandle(const PublishedHandle&) = delete;
  PublishedHandle& operator=(const PublishedHandle&) = delete;

  const T* address() const { return object_.get(); }

  // Null if there is no such offer (any more).
  static std::shared_ptr<T> take(const T* address) {
    const std::lock_guard lock(mutex_);
    const auto found = offered_.find(address);
    return found == offered_.end() ? nullptr : found->second;
  }

 private:
  static inline std::mutex mutex_;
  static inline std::map<const T*, std::shared_ptr<T>> offered_;

  std::shared_ptr<T> object_;
};

}  // namespace ferry
