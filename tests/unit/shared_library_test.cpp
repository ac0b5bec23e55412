// Which folders are searched for libraries that Python packages bring, and for modules of Ferry.
#include "base/shared_library.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace ferry {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "ferry_test_of_packages/lib.so.1";

class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

// Two installations: NAME with a folder bin, and one whose name a pattern of NAME would match.
class PythonPackages : public testing::Test {
 protected:
  PythonPackages() {
    std::string pattern = (fs::temp_directory_path() / "ferry-packages-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no folder");
    root_ = fs::canonical(pattern);
    before_ = fs::current_path();
    fs::current_path(root_);
    for (const char* name : {"own", "o?n"}) {
      fs::create_directories(root_ / name / "bin");
      const fs::path file = root_ / name / "lib/python3.11/site-packages" / kFile;
      fs::create_directories(file.parent_path());
      std::ofstream(file) << "x";
    }
  }
  ~PythonPackages() override {
    fs::current_path(before_);
    fs::remove_all(root_);
  }
  std::string found_in(const std::string& name) const {
    return (root_ / name / "lib/python3.11/site-packages" / kFile).string();
  }

  fs::path root_, before_;
  Variable venv_{"VIRTUAL_ENV", ""}, pythonpath_{"PYTHONPATH", ""}, path_{"PATH", "/nowhere"},
      home_{"HOME", ""};
};

TEST_F(PythonPackages, RelativeFoldersAreNotSearched) {
  const std::string packages = "own/lib/python3.11/site-packages";
  fs::create_directories("own/.local/lib");
  fs::create_directory_symlink(root_ / "own/lib/python3.11", "own/.local/lib/python3.11");
  for (const auto& [name, value] :
       std::vector<std::pair<const char*, std::string>>{{"PATH", "own/bin:./own/bin:"},
                                                        {"PYTHONPATH", packages},
                                                        {"VIRTUAL_ENV", "own"},
                                                        {"HOME", "own"}}) {
    const Variable changed(name, value);
    EXPECT_EQ(files_of_python_packages(kFile), std::vector<std::string>()) << name;
    const std::string first = value.substr(0, value.find(':'));
    const Variable absolute(name, (root_ / first).string());
    EXPECT_EQ(files_of_python_packages(kFile).size(), 1U) << name;
  }
}

TEST_F(PythonPackages, FoldersAreNoPatterns) {
  const Variable path("PATH", (root_ / "o?n/bin").string());
  EXPECT_EQ(files_of_python_packages(kFile), std::vector<std::string>{found_in("o?n")});
}

// The name by which a library was loaded is relative to a folder that the process may have left.
TEST_F(PythonPackages, ModulesAreSoughtBesideALibraryThatWasLoadedByItsWholePath) {
  const fs::path library = FERRY_TEST_MODULE_PATHS;
  const fs::path relative = library.parent_path().filename() / library.filename();
  for (const fs::path& path : {relative, library}) {
    fs::current_path(library.parent_path().parent_path());
    void* const loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    fs::current_path(root_);
    ASSERT_NE(loaded, nullptr) << dlerror();
    const auto sought = reinterpret_cast<bool (*)(const char*)>(dlsym(loaded, "module_is_sought_at"));
    EXPECT_EQ(sought((path.parent_path() / "module.so").c_str()), path.is_absolute()) << path;
    EXPECT_TRUE(sought("module.so"));
    dlclose(loaded);
  }
}

}  // namespace
}  // namespace ferry
