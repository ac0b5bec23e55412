#include "engine/nccl_library.hpp"

#include <dlfcn.h>
#include <glob.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

namespace {

constexpr const char* kNcclName = "libnccl.so.2";

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0)
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

std::string variable_text(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// The paths in a colon-separated variable.
std::vector<std::string> paths_in(const char* name) {
  std::vector<std::string> paths;
  std::istringstream all(variable_text(name));
  for (std::string path; std::getline(all, path, ':');)
    if (!path.empty()) paths.push_back(path);
  return paths;
}

template <class Function>
void find_optional(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

template <class Function>
void find_function(Function& function, void* library, const std::string& path, const char* name) {
  find_optional(function, library, name);
  if (function == nullptr)
    throw UnsupportedError(str(path, " has no ", name, ": it is not NCCL, or older than 2.18"));
}

Nccl functions_of(void* library, const std::string& path) {
  Nccl nccl{};
  nccl.path = path;
  find_function(nccl.version, library, path, "ncclGetVersion");
  find_function(nccl.unique_id, library, path, "ncclGetUniqueId");
  find_function(nccl.init_rank, library, path, "ncclCommInitRank");
  find_function(nccl.init_rank_config, library, path, "ncclCommInitRankConfig");
  find_function(nccl.async_error, library, path, "ncclCommGetAsyncError");
  find_function(nccl.abort, library, path, "ncclCommAbort");
  find_function(nccl.finalize, library, path, "ncclCommFinalize");
  find_function(nccl.destroy, library, path, "ncclCommDestroy");
  find_function(nccl.error_text, library, path, "ncclGetErrorString");
  find_function(nccl.group_start, library, path, "ncclGroupStart");
  find_function(nccl.group_end, library, path, "ncclGroupEnd");
  find_function(nccl.send, library, path, "ncclSend");
  find_function(nccl.receive, library, path, "ncclRecv");
  find_optional(nccl.register_memory, library, "ncclCommRegister");
  find_optional(nccl.deregister_memory, library, "ncclCommDeregister");
  if (nccl.version_number() < Nccl::kOldest)
    throw UnsupportedError(str(path, " is NCCL ", nccl.version_text(), ": 2.18 or later is needed"));
  return nccl;
}

// `path`: empty to search for it.
Nccl open_any(const std::string& path) {
  std::vector<std::string> candidates{path};
  if (path.empty()) {
    candidates = nccl_candidates();
    candidates.insert(candidates.begin(), kNcclName);  // found by the loader
  }
  for (const std::string& candidate : candidates) {
    // Never closed: its threads may outlive static objects.
    if (void* library = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL))
      return functions_of(library, candidate);
  }
  throw UnsupportedError(str("NCCL was not found: ",
                             path.empty() ? std::string("neither by the loader nor in a Python installation")
                                          : path + " cannot be loaded",
                             "; name its ", kNcclName, " in FERRY_NCCL_LIBRARY"));
}

}  // namespace

void Nccl::require(int status, const char* function) const {
  if (status != kSuccess) throw SystemError(str(function, " failed: ", error_text(status)), EIO);
}

int Nccl::version_number() const {
  int number = 0;
  require(version(&number), "ncclGetVersion");
  return number;
}

std::string Nccl::version_text() const {
  const int number = version_number();
  return str(number / 10000, ".", number / 100 % 100, ".", number % 100);
}

std::vector<std::string> nccl_candidates() {
  std::vector<std::string> folders;
  if (const std::string venv = variable_text("VIRTUAL_ENV"); !venv.empty())
    folders.push_back(venv + "/lib/python3*/site-packages");
  for (const std::string& folder : paths_in("PYTHONPATH")) folders.push_back(folder);
  for (const std::string& folder : paths_in("PATH")) {
    if (folder.ends_with("/bin"))
      folders.push_back(folder.substr(0, folder.rfind('/')) + "/lib/python3*/site-packages");
  }
  if (const std::string user_folder = variable_text("HOME"); !user_folder.empty())
    folders.push_back(user_folder + "/.local/lib/python3*/site-packages");
  for (const char* folder : {"/usr/local/lib/python3*/dist-packages", "/usr/local/lib/python3*/site-packages",
                             "/usr/lib/python3*/site-packages", "/opt/*/lib/python3*/site-packages"}) {
    folders.emplace_back(folder);
  }
  std::vector<std::string> paths;
  for (const std::string& folder : folders) {
    const std::vector<std::string> found = matches(folder + "/nvidia/nccl/lib/" + kNcclName);
    paths.insert(paths.end(), found.begin(), found.end());
  }
  return paths;
}

const Nccl& load_nccl(std::string_view given) {
  static std::mutex mutex;
  static std::map<std::string, Nccl> loaded;
  const std::string path = given.empty() ? Environment::read().nccl_library : std::string(given);
  const std::lock_guard lock(mutex);
  const auto known = loaded.find(path);
  return known != loaded.end() ? known->second : loaded.emplace(path, open_any(path)).first->second;
}

}  // namespace ferry
