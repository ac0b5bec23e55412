#include "base/os/file_descriptor.hpp"

#include <unistd.h>

namespace ferry {

FileDescriptor::~FileDescriptor() {
  if (valid()) close(number_);
}

}  // namespace ferry
