#include "base/shared_library.hpp"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>

#include <sstream>
#include <system_error>

#include "base/environment.hpp"

namespace ferry {

namespace fs = std::filesystem;

void* SharedLibrary::symbol(const char* name) const {
  return dlsym(handle, name);
}

SharedLibrary open_library(const fs::path& path, Symbols symbols) {
  SharedLibrary library{path};
  if (std::error_code error; path.has_parent_path() && !fs::exists(path, error)) {
    library.fault = path.string() + " does not exist";
    return library;
  }
  library.handle = dlopen(path.c_str(), RTLD_NOW | (symbols == Symbols::local ? RTLD_LOCAL : RTLD_GLOBAL));
  if (!library) library.fault = dlerror();
  return library;
}

SharedLibrary open_first(const std::vector<std::string>& candidates, Symbols symbols) {
  for (const std::string& candidate : candidates) {
    if (SharedLibrary library = open_library(candidate, symbols)) return library;
  }
  return {};
}

namespace {

// Whether files of the folder may be loaded. What a relative path names depends on where the process runs.
bool is_absolute(const std::string& folder) {
  return folder.starts_with('/');
}

// Empty where the library is linked into the program, or was itself loaded by a relative path.
fs::path directory_of_this_library() {
  Dl_info info{};
  link_map* loaded = nullptr;
  if (dladdr1(reinterpret_cast<const void*>(&module_paths), &info, reinterpret_cast<void**>(&loaded),
              RTLD_DL_LINKMAP) == 0)
    return {};
  return is_absolute(loaded->l_name) ? fs::path(loaded->l_name).parent_path() : fs::path();
}

}  // namespace

std::vector<fs::path> module_paths(const char* module, const std::string& named) {
  if (!named.empty()) return {named};
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error).parent_path();
  std::vector<fs::path> paths;
  for (const fs::path& folder : {directory_of_this_library(), program, program.parent_path() / FERRY_LIBDIR,
                                 fs::path(FERRY_FULL_LIBDIR)}) {
    if (!folder.empty()) paths.push_back(folder / module);
  }
  paths.emplace_back(module);  // LD_LIBRARY_PATH, and the run path of what holds this code
  return paths;
}

namespace {

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0)
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

// The absolute paths in a colon-separated variable.
std::vector<std::string> paths_in(const char* name) {
  std::vector<std::string> paths;
  std::istringstream all(environment_variable(name));
  for (std::string path; std::getline(all, path, ':');)
    if (is_absolute(path)) paths.push_back(path);
  return paths;
}

// A pattern that matches the path alone.
std::string literally(const std::string& path) {
  std::string pattern;
  for (const char c : path) {
    if (std::string_view("*?[]\\").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

}  // namespace

std::vector<std::string> files_of_python_packages(std::string_view file) {
  std::vector<std::string> folders;
  if (const std::string venv = environment_variable("VIRTUAL_ENV"); is_absolute(venv))
    folders.push_back(literally(venv) + "/lib/python3*/site-packages");
  for (const std::string& folder : paths_in("PYTHONPATH")) folders.push_back(literally(folder));
  for (const std::string& folder : paths_in("PATH")) {
    if (folder.ends_with("/bin"))
      folders.push_back(literally(folder.substr(0, folder.rfind('/'))) + "/lib/python3*/site-packages");
  }
  if (const std::string user_folder = environment_variable("HOME"); is_absolute(user_folder))
    folders.push_back(literally(user_folder) + "/.local/lib/python3*/site-packages");
  for (const char* folder : {"/usr/local/lib/python3*/dist-packages", "/usr/local/lib/python3*/site-packages",
                             "/usr/lib/python3*/site-packages", "/opt/*/lib/python3*/site-packages"}) {
    folders.emplace_back(folder);
  }
  std::vector<std::string> paths;
  for (const std::string& folder : folders) {
    const std::vector<std::string> found = matches(folder + "/" + std::string(file));
    paths.insert(paths.end(), found.begin(), found.end());
  }
  return paths;
}

}  // namespace ferry
