#include "tools/ferry/run/earlier_run.hpp"

#include <fmt/core.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "ferry/error.hpp"
#include "tools/report/json.hpp"

namespace ferry::app {

namespace {

std::string read_whole(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  std::string text;
  std::array<char, 65536> piece{};
  if (file) {
    while (const std::size_t bytes = std::fread(piece.data(), 1, piece.size(), file.get()))
      text.append(piece.data(), bytes);
  }
  if (!file || std::ferror(file.get()) != 0) {  // opening a folder succeeds, reading it does not
    const int error = errno;
    throw SystemError(fmt::format("--compare {}: {}", path, std::strerror(error)), error);
  }
  return text;
}

}  // namespace

std::shared_ptr<const report::RunReport> read_earlier_run(const std::string& path) {
  if (path.empty()) return nullptr;
  const std::string text = read_whole(path);
  const auto json = nlohmann::ordered_json::parse(text, nullptr, false);
  const auto refuse = [&](const std::string& why) {
    throw UsageError(
        fmt::format("--compare {}: {}; it takes what ferry run --json FILE has written", path, why));
  };
  if (json.is_discarded()) refuse("not JSON");
  try {
    return std::make_shared<const report::RunReport>(report::from_json(json));
  } catch (const UsageError& error) {
    refuse(error.what());
  }
  return nullptr;
}

}  // namespace ferry::app
