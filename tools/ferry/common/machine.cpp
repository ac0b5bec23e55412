#include "tools/ferry/common/machine.hpp"

#include <fmt/core.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

namespace ferry::app {

namespace {

// The rest of the first line of `path` that starts with `key`, without separators.
std::string value_of(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t begin = line.find_first_not_of(" \t:", key.size());
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::int64_t kibibytes(const std::string& key) {
  std::int64_t amount = 0;
  std::istringstream(value_of("/proc/meminfo", key + ":")) >> amount;
  return amount * 1024;
}

std::string in_quotes(const std::string& argument) {
  const bool plain = !argument.empty() && std::all_of(argument.begin(), argument.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("-_=:,./+@%").find(static_cast<char>(c)) != std::string_view::npos;
  });
  return plain ? argument : fmt::format("'{}'", argument);
}

}  // namespace

std::string cpu_name() {
  const std::string name = value_of("/proc/cpuinfo", "model name");
  return name.empty() ? "unknown" : name;
}

std::vector<std::string> cpu_features() {
  std::string flags = value_of("/proc/cpuinfo", "flags");
  if (flags.empty()) flags = value_of("/proc/cpuinfo", "Features");
  std::istringstream words(flags);
  const std::vector<std::string> all{std::istream_iterator<std::string>(words), {}};
  std::vector<std::string> present;
  for (const char* name : {"avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "asimd", "bf16"}) {
    if (std::find(all.begin(), all.end(), name) != all.end()) present.emplace_back(name);
  }
  return present;
}

int cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

std::int64_t memory_bytes() {
  return kibibytes("MemTotal");
}

std::int64_t available_memory_bytes() {
  return kibibytes("MemAvailable");
}

std::int64_t cache_bytes() {
  return std::max(
      {sysconf(_SC_LEVEL4_CACHE_SIZE), sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE), 0L});
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text = "ferry", argument;
  std::getline(file, argument, '\0');  // the program's path
  while (std::getline(file, argument, '\0')) text.append(1, ' ').append(in_quotes(argument));
  return text;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

}  // namespace ferry::app
