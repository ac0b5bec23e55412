#include "group/mpi_library.hpp"

#include <dlfcn.h>
#include <link.h>
#include <sched.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

namespace {

namespace fs = std::filesystem;

constexpr const char* kModule = "libferry_mpi.so";

using Clock = std::chrono::steady_clock;

// A wait tests its operation again and again, because MPI makes progress only inside its calls. It yields the
// processor between tests, and after a while naps, so that ranks that wait for a late peer leave it the
// processor.
constexpr std::chrono::milliseconds kCheckPeriod(5);
constexpr std::chrono::milliseconds kYieldPeriod(100);
constexpr std::chrono::microseconds kNap(50);

// Empty where the library is linked into the program, whose name may be relative to a folder that has changed
// since.
fs::path directory_of_this_library() {
  Dl_info info{};
  link_map* loaded = nullptr;
  if (dladdr1(reinterpret_cast<const void*>(&open_mpi), &info, reinterpret_cast<void**>(&loaded),
              RTLD_DL_LINKMAP) == 0)
    return {};
  return fs::path(loaded->l_name).parent_path();
}

fs::path directory_of_this_program() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path();
}

}  // namespace

std::vector<fs::path> mpi_module_paths() {
  const std::string named = Environment::read().mpi_module;
  if (!named.empty()) return {named};
  const fs::path program = directory_of_this_program();
  std::vector<fs::path> paths;
  for (const fs::path& folder : {directory_of_this_library(), program, program.parent_path() / FERRY_LIBDIR,
                                 fs::path(FERRY_FULL_LIBDIR)}) {
    if (!folder.empty()) paths.push_back(folder / kModule);
  }
  paths.emplace_back(kModule);  // LD_LIBRARY_PATH, and the run path of what holds this code
  return paths;
}

namespace {

// Null, and why, if the file is no module that can be loaded. Never unloaded: MPI cannot be initialised twice
// in one process.
ferry_mpi_open_function load_module(const fs::path& path, MpiModuleFault& fault) {
  fault = {};
  if (std::error_code error; path.has_parent_path() && !fs::exists(path, error)) {
    fault.text = path.string() + " does not exist";
    return nullptr;
  }
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) {
    fault.text = dlerror();
    fault.lacks_library = !fault.text.starts_with(path.string());
    if (fault.lacks_library) fault.text = str(path.string(), " needs ", fault.text);
    return nullptr;
  }
  void* open = dlsym(module, FERRY_MPI_OPEN);
  if (open == nullptr) fault.text = str(path.string(), " has no ", FERRY_MPI_OPEN);
  return reinterpret_cast<ferry_mpi_open_function>(open);
}

ferry_mpi_open_function find_module() {
  std::string tried;
  for (const fs::path& path : mpi_module_paths()) {
    MpiModuleFault fault;
    if (const ferry_mpi_open_function open = load_module(path, fault)) return open;
    tried += "\n  " + fault.text;
  }
  throw UnsupportedError(
      str("Group::mpi() needs MPI (Debian: openmpi-bin) and the MPI module ", kModule,
          ", which is built where CMake finds MPI. Set FERRY_MPI_MODULE to its path. Tried:", tried));
}

ferry_mpi open_module() {
  const ferry_mpi_open_function open = find_module();
  char message[FERRY_MPI_MESSAGE_BYTES] = {};
  ferry_mpi mpi{};
  if (open(&mpi, message) != 0) throw UnsupportedError(str("MPI: ", message));
  return mpi;
}

void check_result(int result, const char* message) {
  if (result != 0) throw SystemError(str("MPI: ", message), EIO);
}

}  // namespace

MpiModuleFault mpi_module_fault(const fs::path& path) {
  MpiModuleFault fault;
  load_module(path, fault);
  return fault;
}

const ferry_mpi& open_mpi() {
  static const ferry_mpi mpi = open_module();
  return mpi;
}

void run_mpi_operation(const StartMpiOperation& start, const std::function<void()>& check) {
  const ferry_mpi& mpi = open_mpi();
  char message[FERRY_MPI_MESSAGE_BYTES] = {};
  ferry_mpi_operation* operation = nullptr;
  check_result(start(&operation, message), message);
  try {
    const Clock::time_point begun = Clock::now();
    Clock::time_point checked = begun;
    const auto is_done = [&] {
      int done = 0;
      check_result(mpi.test(operation, &done, message), message);
      return done != 0;
    };
    while (!is_done()) {
      const Clock::time_point now = Clock::now();
      if (now - checked >= kCheckPeriod) {
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
  } catch (...) {
    mpi.abandon(operation);
    throw;
  }
}

}  // namespace ferry
