// Group::mpi: loads the MPI module at run time and wraps it as a Bootstrap.
#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/launcher.hpp"
#include "group/mpi/module.h"

namespace ferry {

namespace {

namespace fs = std::filesystem;

constexpr const char* kModule = "libferry_mpi.so";

fs::path directory_of_this_library() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&mpi_bootstrap), &info) == 0 || info.dli_fname == nullptr)
    return {};
  return fs::path(info.dli_fname).parent_path();
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
  std::vector<fs::path> paths = {directory_of_this_library() / kModule, program / kModule,
                                 program.parent_path() / FERRY_LIBDIR / kModule};
  const fs::path installed = FERRY_FULL_LIBDIR;
  if (!installed.empty()) paths.push_back(installed / kModule);
  return paths;
}

namespace {

// Never unloaded: MPI cannot be initialised twice in one process.
void* load_module() {
  std::string tried;
  for (const fs::path& path : mpi_module_paths()) {
    if (void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return module;
    tried += str("\n  ", dlerror());
  }
  throw UnsupportedError(
      str("Group::mpi() needs the MPI module ", kModule,
          ", which is built where CMake finds MPI. Set FERRY_MPI_MODULE to its path. Tried:", tried));
}

void check(int result, const char* message) {
  if (result != 0) throw UnsupportedError(str("MPI: ", message));
}

}  // namespace

Bootstrap mpi_bootstrap() {
  const auto open = reinterpret_cast<ferry_mpi_open_function>(dlsym(load_module(), FERRY_MPI_OPEN));
  if (open == nullptr) throw UnsupportedError(str("the MPI module has no ", FERRY_MPI_OPEN, ": ", dlerror()));
  char message[FERRY_MPI_MESSAGE_BYTES] = {};
  ferry_mpi mpi{};
  check(open(&mpi, message), message);

  Bootstrap bootstrap;
  bootstrap.rank = mpi.rank;
  bootstrap.ranks = mpi.ranks;
  bootstrap.all_gather = [mpi](const void* mine, void* all, std::size_t bytes) {
    char reason[FERRY_MPI_MESSAGE_BYTES] = {};
    check(mpi.all_gather(mine, all, bytes, reason), reason);
  };
  bootstrap.barrier = [mpi] {
    char reason[FERRY_MPI_MESSAGE_BYTES] = {};
    check(mpi.barrier(reason), reason);
  };
  return bootstrap;
}

}  // namespace ferry
