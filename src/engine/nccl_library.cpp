#include "engine/nccl_library.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <map>
#include <mutex>

#include "base/environment.hpp"
#include "base/python_packages.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

namespace {

constexpr const char* kNcclName = "libnccl.so.2";

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
  return files_of_python_packages(std::string("nvidia/nccl/lib/") + kNcclName);
}

const Nccl& load_nccl(std::string_view given) {
  static std::mutex mutex;
  // Never destroyed: a thread left in NCCL at the deadline may call it while the process exits.
  static auto& loaded = *new std::map<std::string, Nccl>;
  const std::string path = given.empty() ? Environment::read().nccl_library : std::string(given);
  const std::lock_guard lock(mutex);
  const auto known = loaded.find(path);
  return known != loaded.end() ? known->second : loaded.emplace(path, open_any(path)).first->second;
}

}  // namespace ferry
