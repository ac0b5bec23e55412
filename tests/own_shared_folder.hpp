// A shared-memory folder for one test alone: what it leaves behind is not mixed up with what other programs
// of the machine are doing in theirs.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace ferry::test {

class OwnSharedFolder {
 public:
  OwnSharedFolder() {
    std::string path = "/dev/shm/ferry-test-XXXXXX";
    if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("no folder in /dev/shm");
    path_ = path;
    setenv("FERRY_SHM_DIR", path.c_str(), 1);
  }
  ~OwnSharedFolder() {
    unsetenv("FERRY_SHM_DIR");
    std::filesystem::remove_all(path_);
  }
  OwnSharedFolder(const OwnSharedFolder&) = delete;  // owns the folder
  OwnSharedFolder& operator=(const OwnSharedFolder&) = delete;

  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

}  // namespace ferry::test
