#include "memory/shared_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>

#include "base/environment.hpp"
#include "base/system_error.hpp"

namespace ferry {

namespace {

// A file system without a size limit reports 0 blocks.
std::int64_t free_bytes(int descriptor) {
  struct statvfs status{};
  if (fstatvfs(descriptor, &status) != 0 || status.f_blocks == 0)
    return std::numeric_limits<std::int64_t>::max();
  return static_cast<std::int64_t>(status.f_bavail * status.f_frsize);
}

std::int64_t allocated_bytes(int descriptor) {
  struct stat status{};
  return fstat(descriptor, &status) == 0 ? static_cast<std::int64_t>(status.st_blocks) * 512 : 0;
}

SystemError out_of_memory(const std::string& directory, std::int64_t needed, std::int64_t available,
                          int error) {
  return system_error(str("shared memory in ", directory, " is too small: ", needed, " bytes needed, ",
                          available, " bytes free (set FERRY_SHM_DIR to use another directory)"),
                      error);
}

}  // namespace

SharedFile::SharedFile(std::int64_t bytes) {
  const std::string directory = Environment::read().shm_dir;
  descriptor_ = FileDescriptor(open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!descriptor_.valid()) throw system_error(str("cannot create an unnamed file in ", directory), errno);

  const std::int64_t size = std::max<std::int64_t>(bytes, 1);
  const std::int64_t available = free_bytes(descriptor_.number());
  if (available < size) throw out_of_memory(directory, size, available, ENOSPC);
  if (ftruncate(descriptor_.number(), size) != 0) throw out_of_memory(directory, size, available, errno);
  mapping_ = Mapping::file(descriptor_.number(), size);
  try {
    mapping_.populate();
  } catch (const SystemError&) {
    // Other files took the space since it was counted. The pages of this file are about to be freed, so they
    // count as free.
    throw out_of_memory(directory, size,
                        free_bytes(descriptor_.number()) + allocated_bytes(descriptor_.number()), ENOSPC);
  }
}

}  // namespace ferry
