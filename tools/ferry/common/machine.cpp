#include "tools/ferry/common/machine.hpp"

#include <fmt/core.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "base/mapping.hpp"
#include "ferry/error.hpp"
#include "tools/report/summary.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

// The value of the first line of `path` that starts with `key`.
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

std::string machine_line() {
  return fmt::format("{}, {}, {}", cpu_name(), report::counted(cores(), "core"),
                     report::in_bytes(static_cast<double>(memory_bytes())));
}

nlohmann::ordered_json machine_json() {
  return {{"cpu", cpu_name()}, {"cores", cores()}, {"memory_bytes", memory_bytes()}};
}

std::int64_t available_memory_bytes() {
  return kibibytes("MemAvailable");
}

void require_free_memory(double bytes, const std::string& task) {
  const auto available = static_cast<double>(available_memory_bytes());
  if (available == 0 || bytes < available) return;
  throw SystemError(fmt::format("{} would take about {:.1f} GB of memory, but only {:.1f} GB are free", task,
                                bytes * 1e-9, available * 1e-9),
                    ENOMEM);
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

// ---- memcpy

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLeastRounds = 5;
constexpr double kMeasuredSeconds = 0.1;

// The largest cache of a core; 0 if unknown.
std::int64_t cache_bytes() {
  return std::max(
      {sysconf(_SC_LEVEL4_CACHE_SIZE), sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE), 0L});
}

// Bytes of all threads' buffers together.
//
// Four times the last-level cache leaves little of a buffer in the cache when a round comes back to it. A
// virtual machine may report the cache of the whole host, of which this process gets a part. A larger buffer
// then only costs page faults: with 260 MiB reported, buffers of 256 MiB and of 1,300 MiB both gave 14 GB/s.
std::int64_t memcpy_buffer_bytes() {
  constexpr std::int64_t kLeast = 64LL << 20, kMost = 256LL << 20;
  return std::clamp(4 * cache_bytes(), kLeast, kMost);
}

// Source and target of one thread. Writing them here makes the system allocate their pages.
struct CopyBuffers {
  explicit CopyBuffers(std::int64_t bytes) : source(bytes), target(bytes) {
    std::memset(source.data(), 1, static_cast<std::size_t>(bytes));
    std::memset(target.data(), 2, static_cast<std::size_t>(bytes));
  }
  void copy() const { std::memcpy(target.data(), source.data(), static_cast<std::size_t>(target.bytes())); }
  LocalMemory source, target;
};

std::vector<double> copy_rounds_seconds(int threads, std::int64_t bytes) {
  std::vector<double> rounds;
  Clock::time_point start, round_start;
  bool done = false;
  // Runs while all threads wait: ends a round and begins the next.
  auto next_round = [&]() noexcept {
    const Clock::time_point now = Clock::now();
    if (round_start == Clock::time_point{}) {
      start = now;
    } else {
      rounds.push_back(std::chrono::duration<double>(now - round_start).count());
    }
    done = rounds.size() >= kLeastRounds &&
           std::chrono::duration<double>(Clock::now() - start).count() > kMeasuredSeconds;
    round_start = Clock::now();
  };
  std::barrier meet(threads, next_round);
  auto work = [&] {
    const CopyBuffers buffers(bytes);
    buffers.copy();
    while (true) {
      meet.arrive_and_wait();
      if (done) return;
      buffers.copy();
    }
  };
  rounds.reserve(1U << 16);
  std::vector<std::jthread> workers;
  for (int i = 0; i < threads; ++i) workers.emplace_back(work);
  workers.clear();  // joins
  return rounds;
}

}  // namespace

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {report::percentile(values, 50), report::percentile(values, 10), report::percentile(values, 90)};
}

Spread memcpy_bytes_per_second(int threads) {
  static int last_threads = 0;
  static Clock::time_point last_time;
  static Spread last{};
  if (threads == last_threads && Clock::now() - last_time < std::chrono::seconds(1)) return last;
  const std::int64_t bytes = memcpy_buffer_bytes() / 2 / threads;
  std::vector<double> rates;
  for (const double seconds : copy_rounds_seconds(threads, bytes))
    rates.push_back(2.0 * static_cast<double>(bytes) * threads / seconds);
  last_threads = threads;
  last = spread_of(std::move(rates));
  last_time = Clock::now();
  return last;
}

}  // namespace ferry::app
