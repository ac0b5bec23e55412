#include "tools/ferry/common/input.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>

#include "ferry/error.hpp"
#include "tools/report/json_field.hpp"

namespace ferry::app {

namespace {

constexpr std::int64_t kMostBytes = 256 << 20;  // of a text

[[noreturn]] void fail(const std::string& name, int error) {
  throw SystemError(fmt::format("{}: {}", name, std::strerror(error)), error);
}

class InputFile {
 public:
  // Without O_NONBLOCK, opening a pipe waits for its writer.
  InputFile(const std::string& path, const std::string& name)
      : descriptor_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    if (descriptor_ < 0) fail(name, errno);
  }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile() { close(descriptor_); }

  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

std::string read_file(const std::string& path, const std::string& name) {
  const InputFile file(path, name);
  struct stat status{};
  if (fstat(file.get(), &status) != 0) fail(name, errno);
  if (S_ISDIR(status.st_mode)) fail(name, EISDIR);
  if (!S_ISREG(status.st_mode)) throw UsageError(fmt::format("{}: expected a regular file", name));
  if (status.st_size > kMostBytes)
    throw UsageError(fmt::format("{}: {} bytes, expected at most {}", name, status.st_size, kMostBytes));
  std::string text;
  try {
    text.resize(static_cast<std::size_t>(status.st_size));
  } catch (const std::exception&) {  // std::bad_alloc, std::length_error
    throw SystemError(fmt::format("{}: no memory for its {} bytes", name, status.st_size), ENOMEM);
  }
  std::size_t end = 0;
  while (end < text.size()) {
    const ssize_t bytes = read(file.get(), text.data() + end, text.size() - end);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) fail(name, errno);
    if (bytes == 0) break;  // the file has shrunk meanwhile
    end += static_cast<std::size_t>(bytes);
  }
  text.resize(end);
  return text;
}

nlohmann::ordered_json read_json_file(const std::string& path, const std::string& name,
                                      const std::string& remedy) {
  try {
    return report::parse_json(read_file(path, name));
  } catch (const UsageError& error) {
    const std::string text = error.what();
    throw UsageError(text.starts_with(name) ? text : fmt::format("{}: {}; {}", name, text, remedy));
  }
}

}  // namespace ferry::app
