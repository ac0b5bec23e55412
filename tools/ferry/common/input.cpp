#include "tools/ferry/common/input.hpp"

#include <fmt/core.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "ferry/error.hpp"

namespace ferry::app {

std::string read_file(const std::string& path, const std::string& name) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  std::string text;
  std::array<char, 65536> piece{};
  if (file) {
    while (const std::size_t bytes = std::fread(piece.data(), 1, piece.size(), file.get()))
      text.append(piece.data(), bytes);
  }
  if (!file || std::ferror(file.get()) != 0) {  // opening a folder succeeds, reading it does not
    const int error = errno;
    throw SystemError(fmt::format("{}: {}", name, std::strerror(error)), error);
  }
  return text;
}

}  // namespace ferry::app
