#include "base/python_packages.hpp"

#include <glob.h>

#include <cstdlib>
#include <sstream>

namespace ferry {
namespace {

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

}  // namespace

std::vector<std::string> files_of_python_packages(std::string_view file) {
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
    const std::vector<std::string> found = matches(folder + "/" + std::string(file));
    paths.insert(paths.end(), found.begin(), found.end());
  }
  return paths;
}

}  // namespace ferry
