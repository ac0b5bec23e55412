#include "backends/nvshmem/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "base/environment.hpp"
#include "base/shared_library.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/version.hpp"

namespace ferry::nvshmem {
namespace {

constexpr const char* kLibrary = "libnvshmem_host.so.3";

// Loads NVSHMEM's library, so that the module finds it in the process by its name. It may also be missing
// here, as the module may know a path of its own.
void preload_library() {
  if (dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD) != nullptr) return;
  const std::string named = Environment::read().nvshmem_library;
  if (!named.empty()) {
    if (const SharedLibrary library = open_library(named, Symbols::global); !library)
      throw UnsupportedError(str("FERRY_NVSHMEM_LIBRARY: ", library.fault));
    return;
  }
  std::vector<std::string> candidates =
      files_of_python_packages(std::string("nvidia/nvshmem/lib/") + kLibrary);
  candidates.insert(candidates.begin(), kLibrary);  // found by the loader
  open_first(candidates, Symbols::global);
}

}  // namespace

Module open_module() {
  preload_library();
  std::string tried;
  for (const std::filesystem::path& path : module_paths(kModuleName, Environment::read().nvshmem_module)) {
    const SharedLibrary module = open_library(path);
    if (!module) {
      tried += "\n  " + module.fault;
      continue;
    }
    OpenFunction open = nullptr;
    Module functions{};
    if (!module.find(open, kOpenName) || !open(ModuleBuild(version()), &functions)) {
      tried += "\n  " + path.string() + " was built with another version of Ferry";
      continue;
    }
    return functions;
  }
  throw UnsupportedError(str("NVSHMEM needs the module ", kModuleName,
                             ", which a build with FERRY_CUDA makes where it finds NVSHMEM 3, and ", kLibrary,
                             " (Python package nvidia-nvshmem-cu13). Set FERRY_NVSHMEM_MODULE and "
                             "FERRY_NVSHMEM_LIBRARY to their paths. Tried:",
                             tried));
}

const Module& load_module() {
  static const Module module = open_module();
  return module;
}

std::string library_path() {
  const link_map* loaded = nullptr;
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr || dlinfo(library, RTLD_DI_LINKMAP, &loaded) != 0)
    throw UnsupportedError(str("this process has not loaded ", kLibrary));
  return loaded->l_name;
}

}  // namespace ferry::nvshmem
