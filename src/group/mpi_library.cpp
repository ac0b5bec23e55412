#include "group/mpi_library.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "base/environment.hpp"
#include "base/process.hpp"
#include "base/shared_library.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/liveness.hpp"
#include "group/rendezvous.hpp"

namespace ferry {

namespace {

namespace fs = std::filesystem;

constexpr const char* kModule = "libferry_mpi.so";

using Clock = std::chrono::steady_clock;

// A wait tests its operation again and again, because MPI makes progress only inside its calls. It yields the
// processor between tests, and after a while naps, so that ranks that wait for a late peer leave it the
// processor.
constexpr std::chrono::milliseconds kMpiCheckPeriod(5);
constexpr std::chrono::milliseconds kYieldPeriod(100);
constexpr std::chrono::microseconds kNap(50);

}  // namespace

std::vector<fs::path> mpi_module_paths() {
  return module_paths(kModule, Environment::read().mpi_module);
}

namespace {

// Null, and why, if the file is no module that can be loaded. Never unloaded: MPI cannot be initialised twice
// in one process.
ferry_mpi_open_function load_module(const fs::path& path, MpiModuleFault& fault) {
  const SharedLibrary module = open_library(path);
  fault = {.text = module.fault};
  ferry_mpi_open_function open = nullptr;
  if (!module) {
    fault.lacks_library = !fault.text.starts_with(path.string());
    if (fault.lacks_library) fault.text = str(path.string(), " needs ", fault.text);
  } else if (!module.find(open, FERRY_MPI_OPEN)) {
    fault.text = str(path.string(), " has no ", FERRY_MPI_OPEN);
  }
  return open;
}

ferry_mpi_open_function find_module() {
  std::string tried;
  for (const fs::path& path : mpi_module_paths()) {
    MpiModuleFault fault;
    if (const ferry_mpi_open_function open = load_module(path, fault)) return open;
    tried += "\n  " + fault.text;
  }
  throw UnsupportedError(str("Group::mpi() needs MPI and the MPI module ", kModule,
                             ", which is built where CMake finds MPI (Debian: libopenmpi-dev openmpi-bin): "
                             "install it and build Ferry again with "
                             "-D FERRY_MPI=ON, or set FERRY_MPI_MODULE to the module's path. Tried:",
                             tried));
}

void check_result(int result, const char* message) {
  if (result != 0) throw SystemError(str("MPI: ", message), EIO);
}

// run_mpi_operation(). After an exception MPI still knows the operation.
void run(const ferry_mpi& mpi, const StartMpiOperation& start, const std::function<void()>& check) {
  char message[FERRY_MPI_MESSAGE_BYTES] = {};
  ferry_mpi_operation* operation = nullptr;
  check_result(start(&operation, message), message);
  const Clock::time_point begun = Clock::now();
  Clock::time_point checked = begun;
  const auto is_done = [&] {
    int done = 0;
    check_result(mpi.test(operation, &done, message), message);
    return done != 0;
  };
  while (!is_done()) {
    const Clock::time_point now = Clock::now();
    if (now - checked >= kMpiCheckPeriod) {
      try {
        check();
      } catch (...) {
        // Peers that have finished this operation may fail the group in a later one.
        if (is_done()) return;
        throw;
      }
      checked = now;
    }
    if (now - begun < kYieldPeriod) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

// The MPI job, as this process has joined it.
class Job {
 public:
  Job() {
    const ferry_mpi_open_function open = find_module();
    char message[FERRY_MPI_MESSAGE_BYTES] = {};
    if (open(&mpi_, message) != 0) throw UnsupportedError(str("MPI: ", message));
    find_local_processes();
  }

  const ferry_mpi& mpi() const {
    require_own_process("MPI", process_);
    return mpi_;
  }

  void run(const StartMpiOperation& start, const std::function<void()>& check) {
    try {
      ferry::run(mpi(), start, check);
    } catch (...) {
      failed_ = true;
      throw;
    }
  }

  void watch(std::shared_ptr<const ControlBlock> control) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [&](const std::shared_ptr<const ControlBlock>& group) {
      if (group.use_count() > 1) return false;
      if (group->failed()) failed_ = true;
      return true;  // no rank of this process is in it any more
    });
    groups_.push_back(std::move(control));
  }

  // At exit. MPI_Finalize has no deadline, so it must not be called unless all ranks will call it: waits for
  // them, and does nothing once one of them is lost. The end of a rank of another host is not seen here.
  void finalize() noexcept {
    try {
      if (mpi_.finalize == nullptr || this_process() != process_) return;
      const auto check = [&] {
        if (has_lost_a_rank()) throw PeerLostError("MPI is not finalised", {});
      };
      check();
      ferry::run(
          mpi_,
          [&](ferry_mpi_operation** operation, char* message) {
            return mpi_.start_all_gather(nullptr, nullptr, 0, operation, message);
          },
          check);
    } catch (...) {
      return;  // also where no memory is left: the process ends anyway
    }
    mpi_.finalize();
  }

 private:
  struct Process {
    HostIdentity host;
    int number;
  };

  void find_local_processes() {
    const Process mine{HostIdentity::of_this_process({}), process_};
    std::vector<Process> all(static_cast<std::size_t>(mpi_.ranks));
    ferry::run(
        mpi_,
        [&](ferry_mpi_operation** operation, char* message) {
          return mpi_.start_all_gather(&mine, all.data(), sizeof mine, operation, message);
        },
        [] {});
    for (const Process& process : all) {
      if (process.host == mine.host && process.number != process_) local_processes_.push_back(process.number);
    }
  }

  bool has_lost_a_rank() {
    const std::lock_guard lock(mutex_);
    return failed_ ||
           std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->failed(); }) ||
           std::any_of(local_processes_.begin(), local_processes_.end(), has_ended);
  }

  const int process_ = this_process();
  ferry_mpi mpi_{};
  std::vector<int> local_processes_;  // of the other ranks on this host
  std::atomic<bool> failed_ = false;  // an operation has been given up, or a group that is over has failed
  std::mutex mutex_;
  std::vector<std::shared_ptr<const ControlBlock>> groups_;
};

Job& job() {
  // Never destroyed: threads may call MPI while the process ends.
  static auto* const joined = [] {
    auto* const made = new Job;
    std::atexit([] { job().finalize(); });
    return made;
  }();
  return *joined;
}

}  // namespace

MpiModuleFault mpi_module_fault(const fs::path& path) {
  MpiModuleFault fault;
  load_module(path, fault);
  return fault;
}

const ferry_mpi& open_mpi() {
  return job().mpi();
}

void watch_mpi_group(std::shared_ptr<const ControlBlock> control) {
  job().watch(std::move(control));
}

void run_mpi_operation(const StartMpiOperation& start, const std::function<void()>& check) {
  job().run(start, check);
}

}  // namespace ferry
