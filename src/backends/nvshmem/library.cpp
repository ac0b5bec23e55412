#include "backends/nvshmem/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "base/environment.hpp"
#include "base/python_packages.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/version.hpp"

namespace ferry::nvshmem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLibrary = "libnvshmem_host.so.3";

// Loads NVSHMEM's library, so that the module finds it in the process by its name. It may also be missing
// here, as the module may know a path of its own.
void preload_library() {
  if (dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD) != nullptr) return;
  const std::string named = Environment::read().nvshmem_library;
  if (!named.empty()) {
    if (dlopen(named.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr)
      throw UnsupportedError(str("FERRY_NVSHMEM_LIBRARY: ", dlerror()));
    return;
  }
  std::vector<std::string> candidates =
      files_of_python_packages(std::string("nvidia/nvshmem/lib/") + kLibrary);
  candidates.insert(candidates.begin(), kLibrary);  // found by the loader
  for (const std::string& candidate : candidates) {
    if (dlopen(candidate.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return;
  }
}

std::vector<fs::path> module_paths() {
  const std::string named = Environment::read().nvshmem_module;
  if (!named.empty()) return {named};
  std::vector<fs::path> paths;
  Dl_info info{};
  link_map* loaded = nullptr;
  if (dladdr1(reinterpret_cast<const void*>(&load_module), &info, reinterpret_cast<void**>(&loaded),
              RTLD_DL_LINKMAP) != 0 &&
      loaded->l_name[0] != '\0')
    paths.push_back(fs::path(loaded->l_name).parent_path() / kModuleName);
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error).parent_path();
  paths.push_back(program / kModuleName);
  paths.push_back(program.parent_path() / "lib" / kModuleName);
  paths.emplace_back(kModuleName);  // LD_LIBRARY_PATH, and the run path of the binary that holds this code
  return paths;
}

}  // namespace

Module open_module() {
  preload_library();
  std::string tried;
  for (const fs::path& path : module_paths()) {
    if (std::error_code error; path.has_parent_path() && !fs::exists(path, error)) {
      tried += "\n  " + path.string() + " does not exist";
      continue;
    }
    void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (module == nullptr) {
      tried += str("\n  ", dlerror());
      continue;
    }
    const auto open = reinterpret_cast<OpenFunction>(dlsym(module, kOpenName));
    Module functions{};
    if (open == nullptr || !open(ModuleBuild(version()), &functions)) {
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
