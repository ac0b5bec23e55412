#include "apps/ferry/output.hpp"

#include <fmt/core.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "ferry/error.hpp"

namespace ferry::app {

namespace {

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

SystemError cannot_write(const std::string& path, int error) {
  return SystemError(fmt::format("cannot write '{}': {}", path, std::strerror(error)), error);
}

File open(const std::string& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode));
  if (!file) throw cannot_write(path, errno);
  return file;
}

void put(const std::string& path, const std::string& text, std::FILE* file) {
  const bool all = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (!all || std::fflush(file) != 0) throw cannot_write(path, errno);
}

}  // namespace

Output::Output(std::string path) : path_(std::move(path)) {
  if (wanted() && !to_stdout()) open(path_, "a");
}

void Output::write(const std::string& text) const {
  if (!wanted()) return;
  if (to_stdout()) return put("standard output", text, stdout);
  put(path_, text, open(path_, "w").get());
}

}  // namespace ferry::app
