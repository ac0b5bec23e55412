#include "memory/file_descriptor.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/system_error.hpp"

namespace ferry {

Descriptor::~Descriptor() {
  if (valid()) close(number_);
}

Descriptor Descriptor::of_process(int process, int number) {
  const std::string path = str("/proc/", process, "/fd/", number);
  Descriptor descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!descriptor.valid()) throw system_error(str("cannot open ", path), errno);
  return descriptor;
}

}  // namespace ferry
