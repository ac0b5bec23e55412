// A library that holds Ferry's code and says where it would look for a module of Ferry.
#include <algorithm>

#include "base/shared_library.hpp"

extern "C" bool module_is_sought_at(const char* path) {
  const auto paths = ferry::module_paths("module.so", "");
  return std::find(paths.begin(), paths.end(), path) != paths.end();
}
