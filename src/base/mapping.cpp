#include "base/mapping.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/errors.hpp"

namespace ferry {

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Mapping Mapping::map(std::int64_t bytes, int flags, int descriptor) {
  Mapping mapping;
  mapping.bytes_ = std::max<std::int64_t>(bytes, 1);  // mmap() refuses an empty range
  void* data = mmap(nullptr, mapping.bytes_, PROT_READ | PROT_WRITE, flags, descriptor, 0);
  if (data == MAP_FAILED)
    throw system_error(
        str("cannot map ", counted(bytes, "byte"), " (", static_cast<double>(bytes) / 1e9, " GB) of memory"),
        errno);
  mapping.data_ = static_cast<std::byte*>(data);
  madvise(data, mapping.bytes_, MADV_HUGEPAGE);  // a hint: small pages work as well
  return mapping;
}

Mapping Mapping::anonymous(std::int64_t bytes) {
  return map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

Mapping Mapping::anonymous_shared(std::int64_t bytes) {
  return map(bytes, MAP_SHARED | MAP_ANONYMOUS, -1);
}

Mapping Mapping::file(int descriptor, std::int64_t bytes) {
  return map(bytes, MAP_SHARED, descriptor);
}

void Mapping::populate() const {
  // Reports a full file system as an error. A plain access would raise SIGBUS instead.
  while (madvise(data_, bytes_, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    throw system_error(str("cannot allocate ", counted(bytes_, "byte"), " (",
                           static_cast<double>(bytes_) / 1e9, " GB) of memory"),
                       errno);
  }
}

}  // namespace ferry
