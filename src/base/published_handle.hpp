// Hands shared ownership of an object from one thread to other threads of the process, by the object's
// address.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace ferry {

// While a handle lives, other threads may take the object by its address. A thread that comes too late gets a
// null pointer instead of a dangling one.
template <class T>
class PublishedHandle {
 public:
  explicit PublishedHandle(std::shared_ptr<T> object) : object_(std::move(object)) {
    const std::lock_guard lock(mutex_);
    published_[object_.get()] = object_;
  }
  ~PublishedHandle() {
    const std::lock_guard lock(mutex_);
    published_.erase(object_.get());
  }
  PublishedHandle(const PublishedHandle&) = delete;
  PublishedHandle& operator=(const PublishedHandle&) = delete;

  const T* address() const { return object_.get(); }

  // Null if no handle publishes this address (any more).
  static std::shared_ptr<T> take(const T* address) {
    const std::lock_guard lock(mutex_);
    const auto found = published_.find(address);
    return found == published_.end() ? nullptr : found->second;
  }

 private:
  static inline std::mutex mutex_;
  static inline std::map<const T*, std::shared_ptr<T>> published_;

  std::shared_ptr<T> object_;
};

}  // namespace ferry
