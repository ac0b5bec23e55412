#include "backends/nvshmem/session.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/callback_thread.hpp"
#include "base/environment.hpp"
#include "base/shared_library.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/version.hpp"
#include "group/agreement.hpp"
#include "group/rank_state.hpp"

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

namespace {

// A piece of the heap. Pieces are never released, and are allocated in the same order on all ranks.
struct Piece {
  std::byte* data;
  std::int64_t bytes;
  std::weak_ptr<void> use;  // expired: free
};

constexpr std::size_t kReusedPieces = 64;  // pieces that can be used again, one bit each

// NVSHMEM's state belongs to the process, not to a group.
struct Process {
  std::mutex mutex;
  std::atomic<bool> failed = false;
  bool started_by_ferry = false;
  std::vector<Piece> pieces;
};
Process& process() {
  static auto* const state = new Process;  // used by destructors of static objects
  return *state;
}

void require(int status, const char* function) {
  if (status != 0) throw SystemError(str(function, " failed with status ", status), EIO);
}

// NVSHMEM prints errors of its own to stderr.
constexpr const char* kSeeStderr = "; NVSHMEM's messages on stderr say why (NVSHMEM_DEBUG=INFO: more)";

}  // namespace

void Session::note_failure() noexcept {
  process().failed = true;
}

const Module& Session::usable_module() {
  if (process().failed) {
    throw UnsupportedError(
        "a group that used NVSHMEM has failed in this process, so NVSHMEM is not used again: restart the "
        "process, or use another backend");
  }
  return load_module();
}

Session::Session(const Rank& rank, double deadline) : rank_(rank), deadline_(deadline) {
  run_on_all_ranks(rank_, [&] {
    if (rank_.same_process() && rank_.size() > 1)
      throw UnsupportedError("NVSHMEM takes one rank of a process: start the ranks as processes");
    module_ = &usable_module();
  });
  start();
  find_pes();
}

void Session::run(const char* name, std::function<void()> call) {
  RankState& state = rank_.state();
  const WaitRecord record{Operation::construct, 0, rank_.index(), -1, 0, 0};
  const WaitLimit limit{.seconds = deadline_};
  int device = 0;
  cuda::check(cudaGetDevice(&device), "find the current device");
  CallbackThread thread;
  try {
    thread.run(
        name,
        [device, call = std::move(call)] {
          cuda::check(cudaSetDevice(device), "use the rank's device");
          call();
        },
        [&] {
          if (limit.seconds_left() <= 0) state.time_out(record, deadline_);
          if (state.check_peers(record)) state.control().throw_failure(record);
        });
  } catch (...) {
    note_failure();
    throw;
  }
}

void Session::start() {
  const std::uint8_t mine = module_->is_running() ? 1 : 0;
  std::vector<std::uint8_t> running(static_cast<std::size_t>(rank_.size()));
  rank_.all_gather(&mine, running.data(), 1);
  const auto other =
      std::find_if(running.begin(), running.end(), [&](std::uint8_t each) { return each != running[0]; });
  if (other != running.end()) {
    throw UsageError(str("the program has started NVSHMEM on rank ",
                         running[0] != 0 ? 0 : other - running.begin(), " and not on rank ",
                         running[0] != 0 ? other - running.begin() : 0,
                         ": start it on all ranks, or on none"));
  }
  started_by_program_ = mine != 0 && !process().started_by_ferry;
  std::array<std::byte, kIdBytes> id{};
  if (mine == 0) {
    // Ferry's kernels use no multicast, which NVSHMEM would set up at its start.
    setenv("NVSHMEM_DISABLE_NVLS", "1", 0);
    run_on_all_ranks(rank_, [&] {
      if (rank_.index() == 0) require(module_->make_id(id.data()), "nvshmemx_get_uniqueid");
    });
    std::vector<std::array<std::byte, kIdBytes>> all(static_cast<std::size_t>(rank_.size()));
    rank_.all_gather(id.data(), all.data(), sizeof id);
    id = all[0];
  }
  run_on_all_ranks(rank_, [&] {
    run("NVSHMEM's start", [module = module_, index = rank_.index(), size = rank_.size(), id, mine] {
      if (module->start(index, size, mine == 0 ? id.data() : nullptr) != 0)
        throw UnsupportedError(str("NVSHMEM could not be started", kSeeStderr));
    });
  });
  if (mine == 0) process().started_by_ferry = true;
}

void Session::find_pes() {
  const std::int32_t pe = module_->my_pe();
  pes_.resize(static_cast<std::size_t>(rank_.size()));
  rank_.all_gather(&pe, pes_.data(), sizeof pe);
  run_on_all_ranks(rank_, [&] {
    const std::set<std::int32_t> distinct(pes_.begin(), pes_.end());
    if (static_cast<int>(distinct.size()) == rank_.size() && module_->pe_count() == rank_.size()) return;
    throw UsageError(str("NVSHMEM runs with ", module_->pe_count(), " PEs, and the group has ", rank_.size(),
                         " ranks: a group over NVSHMEM must have all PEs, one rank each"));
  });
}

HeapMemory Session::allocate(std::int64_t bytes) {
  require_same_size(rank_, bytes);
  Process& state = process();
  // The lowest piece that is large enough and free on all ranks. All ranks list the same pieces.
  std::uint64_t free = 0;
  {
    const std::lock_guard lock(state.mutex);
    for (std::size_t i = 0; i < std::min(state.pieces.size(), kReusedPieces); ++i) {
      if (state.pieces[i].use.expired() && state.pieces[i].bytes >= bytes) free |= std::uint64_t{1} << i;
    }
  }
  std::vector<std::uint64_t> free_on(static_cast<std::size_t>(rank_.size()));
  rank_.all_gather(&free, free_on.data(), sizeof free);
  for (const std::uint64_t each : free_on) free &= each;

  HeapMemory memory;
  memory.bytes_ = bytes;
  memory.use_ = std::make_shared<char>();
  if (free == 0) {
    const auto made = std::make_shared<void*>(nullptr);
    run_on_all_ranks(rank_, [&] {
      run("NVSHMEM's allocation", [module = module_, made, bytes] {
        *made = module->allocate(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 16)));
      });
      if (*made == nullptr) {
        throw SystemError(str("NVSHMEM's heap has no ", bytes, " bytes: NVSHMEM_SYMMETRIC_SIZE bounds it"),
                          ENOMEM);
      }
    });
    memory.data_ = static_cast<std::byte*>(*made);
    const std::lock_guard lock(state.mutex);
    state.pieces.push_back({memory.data_, bytes, memory.use_});
  } else {
    std::size_t index = 0;
    while ((free >> index & 1) == 0) ++index;
    {
      const std::lock_guard lock(state.mutex);
      memory.data_ = state.pieces[index].data;
      state.pieces[index].use = memory.use_;
    }
    run_on_all_ranks(rank_, [&] { cuda::zero(memory.data_, bytes); });
  }
  for (int r = 0; r < rank_.size(); ++r)
    memory.mapped_.push_back(static_cast<std::byte*>(module_->mapped(memory.data_, pe_of(r))));
  // No peer may store into the memory before it has been zeroed.
  rank_.barrier();
  return memory;
}

}  // namespace ferry::nvshmem
