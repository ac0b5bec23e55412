#include "memory/file_descriptor.hpp"

#include <unistd.h>

namespace ferry {

Descriptor::~Descriptor() {
  if (valid()) close(number_);
}

}  // namespace ferry
