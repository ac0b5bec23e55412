#include "engine/nccl_library.hpp"

#include <cerrno>
#include <map>
#include <mutex>

#include "base/environment.hpp"
#include "base/shared_library.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

namespace {

constexpr const char* kNcclName = "libnccl.so.2";

template <class Function>
void find_function(Function& function, const SharedLibrary& library, const char* name) {
  if (!library.find(function, name))
    throw UnsupportedError(
        str(library.path.string(), " has no ", name, ": it is not NCCL, or older than 2.18"));
}

Nccl functions_of(const SharedLibrary& library) {
  Nccl nccl{};
  nccl.path = library.path;
  find_function(nccl.version, library, "ncclGetVersion");
  find_function(nccl.unique_id, library, "ncclGetUniqueId");
  find_function(nccl.init_rank, library, "ncclCommInitRank");
  find_function(nccl.init_rank_config, library, "ncclCommInitRankConfig");
  find_function(nccl.async_error, library, "ncclCommGetAsyncError");
  find_function(nccl.abort, library, "ncclCommAbort");
  find_function(nccl.finalize, library, "ncclCommFinalize");
  find_function(nccl.destroy, library, "ncclCommDestroy");
  find_function(nccl.error_text, library, "ncclGetErrorString");
  find_function(nccl.group_start, library, "ncclGroupStart");
  find_function(nccl.group_end, library, "ncclGroupEnd");
  find_function(nccl.send, library, "ncclSend");
  find_function(nccl.receive, library, "ncclRecv");
  library.find(nccl.register_memory, "ncclCommRegister");
  library.find(nccl.deregister_memory, "ncclCommDeregister");
  if (nccl.version_number() < Nccl::kOldest)
    throw UnsupportedError(str(nccl.path, " is NCCL ", nccl.version_text(), ": 2.18 or later is needed"));
  return nccl;
}

// `path`: empty to search for it.
Nccl open_any(const std::string& path) {
  std::vector<std::string> candidates{path};
  if (path.empty()) {
    candidates = nccl_candidates();
    candidates.insert(candidates.begin(), kNcclName);  // found by the loader
  }
  if (const SharedLibrary library = open_first(candidates)) return functions_of(library);
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
