#include "tools/ferry/common/output.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>

#include "ferry/error.hpp"

namespace ferry::app {

namespace {

namespace fs = std::filesystem;

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

SystemError cannot_write(const std::string& path, int error) {
  return SystemError(fmt::format("cannot write '{}': {}", path, std::strerror(error)), error);
}

void put(const std::string& path, const std::string& text, std::FILE* file) {
  const bool all = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (!all || std::fflush(file) != 0) throw cannot_write(path, errno);
}

// A file beside `target` that goes away unless it takes its name.
class Beside {
 public:
  Beside(const std::string& path, const std::string& target)
      : path_(path), target_(target), own_(fmt::format("{}.{}.part", target, getpid())) {
    constexpr mode_t kAnybody = 0666;  // less what the umask takes
    const int descriptor = ::open(own_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kAnybody);
    if (descriptor < 0) throw cannot_write(path_, errno);
    file_.reset(fdopen(descriptor, "w"));
    struct stat old{};
    if (stat(target_.c_str(), &old) == 0) fchmod(descriptor, old.st_mode);
  }
  ~Beside() {
    if (!own_.empty()) unlink(own_.c_str());
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

  void write(const std::string& text) { put(path_, text, file_.get()); }
  void take_name() {
    if (std::rename(own_.c_str(), target_.c_str()) != 0) throw cannot_write(path_, errno);
    own_.clear();
  }

 private:
  const std::string& path_;
  const std::string& target_;
  std::string own_;
  File file_;
};

// Of a path that leads to a regular file, or to none yet: where links end. Empty for anything else.
std::string regular_target(const std::string& path) {
  std::error_code failed;
  const fs::file_status status = fs::status(path, failed);
  if (status.type() == fs::file_type::directory) throw cannot_write(path, EISDIR);
  if (status.type() != fs::file_type::regular && status.type() != fs::file_type::not_found) return "";
  const fs::path target = fs::weakly_canonical(path, failed);
  return failed ? path : target.string();
}

}  // namespace

Output::Output(std::string path) : path_(std::move(path)) {
  if (!wanted() || to_stdout()) return;
  target_ = regular_target(path_);
  if (target_.empty() || fs::exists(target_)) {
    if (access(path_.c_str(), W_OK) != 0) throw cannot_write(path_, errno);
  }
  if (!target_.empty()) const Beside try_it(path_, target_);
}

void Output::write(const std::string& text) const {
  if (!wanted()) return;
  if (to_stdout()) return put("standard output", text, stdout);
  if (target_.empty()) {
    const File file(std::fopen(path_.c_str(), "w"));
    if (!file) throw cannot_write(path_, errno);
    return put(path_, text, file.get());
  }
  Beside beside(path_, target_);
  beside.write(text);
  beside.take_name();
}

}  // namespace ferry::app
