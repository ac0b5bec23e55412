// Shared libraries that are opened at run time, and where to look for them.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace ferry {

// Never closed: its threads and handles may outlive static objects.
struct SharedLibrary {
  std::filesystem::path path;
  void* handle = nullptr;  // null: it could not be opened
  std::string fault{};     // why

  explicit operator bool() const { return handle != nullptr; }

  // Sets `function` to the function of this name; false and null if the library has none.
  template <class Function>
  bool find(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(symbol(name));
    return function != nullptr;
  }

 private:
  void* symbol(const char* name) const;
};

// Whether other libraries find the library's functions, as RTLD_LOCAL and RTLD_GLOBAL say.
enum class Symbols { local, global };

// A path without a folder is searched by the dynamic loader.
SharedLibrary open_library(const std::filesystem::path& path, Symbols symbols = Symbols::local);

// The first that can be opened; without one a null library.
SharedLibrary open_first(const std::vector<std::string>& candidates, Symbols symbols = Symbols::local);

// Where a module of Ferry may be, in this order: beside the library that holds this code, beside the program
// and in its library folder, in the folder that Ferry is installed to, and where the dynamic loader searches.
// Only `named`, unless it is empty.
std::vector<std::filesystem::path> module_paths(const char* module, const std::string& named);

// Existing paths SITE/`file`, for every place where a Python installation may keep packages: those of
// VIRTUAL_ENV, PYTHONPATH and PATH first. Relative paths in these variables are left out.
std::vector<std::string> files_of_python_packages(std::string_view file);

}  // namespace ferry
