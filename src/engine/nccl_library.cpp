#include "engine/nccl_library.hpp"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <future>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/callback_thread.hpp"
#include "base/environment.hpp"
#include "base/process.hpp"
#include "base/shared_library.hpp"
#include "base/text.hpp"
#include "engine/transfer_thread.hpp"
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

void settle_nccl(const Nccl& nccl, Nccl::Comm comm, int status, const char* function,
                 const NcclCheck& check) {
  // The start of a transfer takes NCCL's thread some microseconds, and a sleep at least 50.
  constexpr int kPolls = 2000, kPollsBetweenChecks = 100;
  constexpr auto kPause = std::chrono::microseconds(20);
  for (int polls = 1; status == Nccl::kInProgress; ++polls) {
    if (polls > kPolls) std::this_thread::sleep_for(kPause);
    if (polls > kPolls || polls % kPollsBetweenChecks == 0) check();
    pause_processor();
    nccl.require(nccl.async_error(comm, &status), "ncclCommGetAsyncError");
  }
  nccl.require(status, function);
}

void run_blocking_nccl(const std::function<void()>& calls, const NcclCheck& check) {
  constexpr auto kCheckPeriod = std::chrono::milliseconds(10);
  auto thread = std::make_shared<TransferThread>();
  std::future<std::exception_ptr> done = thread->submit(calls);
  try {
    while (done.wait_for(kCheckPeriod) != std::future_status::ready) check();
  } catch (...) {
    keep_forever(std::move(thread));
    throw;
  }
  if (const std::exception_ptr error = done.get()) std::rethrow_exception(error);
}

namespace {

Nccl::Config config_of(bool blocks) {
  constexpr int kUndefined = std::numeric_limits<int>::min();
  return {.blocking = blocks ? 1 : 0,
          .cga_cluster_size = kUndefined,
          .min_ctas = kUndefined,
          .max_ctas = kUndefined,
          .net_name = nullptr,
          .split_share = kUndefined,
          .traffic_class = kUndefined};
}

// A byte from every rank to every other one: NCCL connects a pair at its first transfer, and then for good.
void connect_every_pair(const Nccl& nccl, Nccl::Comm comm, const NcclMembers& members, DeviceStream& stream) {
  std::byte* const memory = stream.memory(2 * std::int64_t{members.ranks});
  NcclGroup group(nccl);
  for (int peer = 0; peer < members.ranks; ++peer) {
    if (peer == members.rank) continue;
    nccl.require(nccl.send(memory + peer, 1, Nccl::kBytes, peer, comm, stream.handle()), "ncclSend");
    nccl.require(nccl.receive(memory + members.ranks + peer, 1, Nccl::kBytes, peer, comm, stream.handle()),
                 "ncclRecv");
  }
  nccl.require(group.end(), "ncclGroupEnd");
}

Nccl::Comm connect_blocking(const Nccl& nccl, const NcclMembers& members, const DeviceAccess& device,
                            const std::shared_ptr<DeviceStream>& stream, const NcclCheck& check) {
  const auto made = std::make_shared<std::atomic<Nccl::Comm>>(nullptr);
  const auto calls = [&nccl, members, select = device.select, stream, made] {
    if (select) select();
    Nccl::Config config = config_of(true);
    Nccl::Comm comm = nullptr;
    nccl.require(nccl.init_rank_config(&comm, members.ranks, members.id, members.rank, &config),
                 "ncclCommInitRankConfig");
    *made = comm;
    connect_every_pair(nccl, comm, members, *stream);
  };
  try {
    run_blocking_nccl(calls, check);
    stream->wait(check);
  } catch (...) {
    if (*made != nullptr) nccl.abort(*made);
    throw;
  }
  return *made;
}

}  // namespace

Nccl::Comm connect_nccl(const Nccl& nccl, const NcclMembers& members, const DeviceAccess& device,
                        const std::shared_ptr<DeviceStream>& stream, const NcclCheck& check) {
  if (members.blocks) return connect_blocking(nccl, members, device, stream, check);
  Nccl::Config config = config_of(false);
  Nccl::Comm comm = nullptr;
  const int status = nccl.init_rank_config(&comm, members.ranks, members.id, members.rank, &config);
  try {
    settle_nccl(nccl, comm, status, "ncclCommInitRankConfig", check);
  } catch (...) {
    if (comm != nullptr) nccl.abort(comm);
    throw;
  }
  return comm;
}

}  // namespace ferry
