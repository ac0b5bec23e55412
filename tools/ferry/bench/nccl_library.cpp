#include "tools/ferry/bench/nccl_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <glob.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <sstream>

#include "ferry/error.hpp"

namespace ferry::app {

namespace {

constexpr const char* kName = "libnccl.so.2";

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0)
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// The paths in a colon-separated variable.
std::vector<std::string> paths_in(const char* name) {
  std::vector<std::string> paths;
  std::istringstream all(environment(name));
  for (std::string path; std::getline(all, path, ':');)
    if (!path.empty()) paths.push_back(path);
  return paths;
}

template <class Function>
void find(Function& function, void* library, const std::string& path, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw UnsupportedError(fmt::format("{} has no {}: it is not NCCL", path, name));
}

Nccl functions_of(void* library, const std::string& path) {
  Nccl nccl{};
  nccl.path = path;
  find(nccl.version, library, path, "ncclGetVersion");
  find(nccl.unique_id, library, path, "ncclGetUniqueId");
  find(nccl.init_rank, library, path, "ncclCommInitRank");
  find(nccl.destroy, library, path, "ncclCommDestroy");
  find(nccl.error_text, library, path, "ncclGetErrorString");
  find(nccl.group_start, library, path, "ncclGroupStart");
  find(nccl.group_end, library, path, "ncclGroupEnd");
  find(nccl.send, library, path, "ncclSend");
  find(nccl.receive, library, path, "ncclRecv");
  return nccl;
}

Nccl open_any(const std::string& path) {
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  std::vector<std::string> candidates{path};
  if (path.empty()) {
    candidates = nccl_candidates();
    candidates.insert(candidates.begin(), kName);  // found by the loader
  }
  for (const std::string& candidate : candidates) {
    // Never closed: its threads may outlive static objects.
    if (void* library = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL))
      return functions_of(library, candidate);
  }
  throw UnsupportedError(fmt::format("NCCL was not found: {}; use --nccl to name its {}",
                                     path.empty() ? "neither by the loader nor in a Python installation"
                                                  : fmt::format("{} cannot be loaded", path),
                                     kName));
}

}  // namespace

void Nccl::require(int status, const char* function) const {
  if (status != kSuccess) throw SystemError(fmt::format("{} failed: {}", function, error_text(status)), EIO);
}

std::string Nccl::version_text() const {
  int number = 0;
  require(version(&number), "ncclGetVersion");
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

std::vector<std::string> nccl_candidates() {
  std::vector<std::string> folders;
  if (const std::string venv = environment("VIRTUAL_ENV"); !venv.empty())
    folders.push_back(venv + "/lib/python3*/site-packages");
  for (const std::string& folder : paths_in("PYTHONPATH")) folders.push_back(folder);
  for (const std::string& folder : paths_in("PATH")) {
    if (folder.ends_with("/bin"))
      folders.push_back(folder.substr(0, folder.rfind('/')) + "/lib/python3*/site-packages");
  }
  if (const std::string user_folder = environment("HOME"); !user_folder.empty())
    folders.push_back(user_folder + "/.local/lib/python3*/site-packages");
  for (const char* folder : {"/usr/local/lib/python3*/dist-packages", "/usr/local/lib/python3*/site-packages",
                             "/usr/lib/python3*/site-packages", "/opt/*/lib/python3*/site-packages"}) {
    folders.emplace_back(folder);
  }
  std::vector<std::string> paths;
  for (const std::string& folder : folders) {
    const std::vector<std::string> found = matches(folder + "/nvidia/nccl/lib/" + kName);
    paths.insert(paths.end(), found.begin(), found.end());
  }
  return paths;
}

const Nccl& load_nccl(const std::string& path) {
  static std::map<std::string, Nccl> loaded;
  const auto known = loaded.find(path);
  return known != loaded.end() ? known->second : loaded.emplace(path, open_any(path)).first->second;
}

}  // namespace ferry::app
