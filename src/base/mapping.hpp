// Mappings of memory, unmapped by their owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace ferry {

// One mmap() mapping.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  // Each maps at least one page, readable and writable, with huge pages where the system grants them. New
  // memory is zero. Throws SystemError if the system refuses.
  static Mapping anonymous(std::int64_t bytes);
  static Mapping anonymous_shared(std::int64_t bytes);  // shared with children of fork()
  static Mapping file(int descriptor, std::int64_t bytes);

  // Allocates every page now. Throws SystemError if there is not enough memory; without this call, a later
  // access would end the process by a signal.
  void populate() const;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  static Mapping map(std::int64_t bytes, int flags, int descriptor);

  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Memory that only one rank uses: zero at first; the system provides each page at its first access.
class LocalMemory {
 public:
  LocalMemory() = default;
  // Aligned to a page. 0: none. Throws SystemError if the system refuses.
  explicit LocalMemory(std::int64_t bytes) : mapping_(bytes > 0 ? Mapping::anonymous(bytes) : Mapping()) {}

  std::byte* data() const { return mapping_.data(); }
  std::int64_t bytes() const { return mapping_.bytes(); }

 private:
  Mapping mapping_;
};

}  // namespace ferry
