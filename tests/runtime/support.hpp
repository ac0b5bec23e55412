// Shared by the tests of groups: kinds of groups, checks that work across processes, random numbers.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "seed.hpp"

namespace ferry::test {

// For checks in a rank's body: it may run in another process, where a failed EXPECT would be lost. Throws
// instead, and Group::run rethrows.
[[noreturn]] void fail_check(const char* file, int line, const char* condition, const std::string& text);

#define FERRY_CHECK(condition, text)                                                     \
  do {                                                                                   \
    if (!(condition)) ::ferry::test::fail_check(__FILE__, __LINE__, #condition, (text)); \
  } while (false)

constexpr double kNoFaultDeadline = 60;  // seconds: the deadline of groups in which no rank is missing

constexpr int kSkipped = 77;  // exit status of a child that lacks a permission that its test needs

using Random = std::mt19937_64;
inline int below(Random& random, int bound) {
  return static_cast<int>(random() % static_cast<std::uint64_t>(bound));
}

// Seconds in which this thread was ready to run while others had the processors, since it began.
double seconds_without_processor();

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  // Less what other work on the machine has taken of it from this thread, which constructed the watch. For
  // upper bounds: a busy machine does not break them, and a wait that is too long does.
  double own_seconds() const { return seconds() - (seconds_without_processor() - without_processor_); }

 private:
  double without_processor_ = seconds_without_processor();
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void sleep_seconds(double seconds);

// A bootstrap that is independent of Ferry: memory shared by threads and forked processes. Construct it
// before starting them. One thread for each rank; gathers at most kBytes.
class TestBootstrap {
 public:
  static constexpr std::size_t kBytes = 20000;

  explicit TestBootstrap(int ranks);
  Bootstrap bootstrap(int rank) const;

 private:
  struct Shared;
  int ranks_;
  std::shared_ptr<Shared> shared_;
};

enum class GroupKind { threads, processes, custom_threads, custom_processes };
std::string name(GroupKind kind);

// Runs `body` as every rank of a group of this kind. Throws what the first failed rank threw
// (custom_processes: an error with the exit statuses).
void run_ranks(GroupKind kind, int ranks, double deadline, const std::function<void(Rank)>& body);

// Runs `body` as every rank of a custom group over simulated hosts. `hosts`: a name for each rank; equal
// names are one host. `kind`: custom_threads or custom_processes; processes get the name by FERRY_HOST_ID.
// Throws as run_ranks().
void run_hosts(GroupKind kind, const std::vector<std::string>& hosts, double deadline,
               const std::function<void(Rank)>& body);

// Runs `body` in a forked process. If it throws, prints the exception; the exit status is 1.
pid_t start_process(const std::function<void()>& body);
// Waits for the end of a process and returns its wait status.
int status_of_process(pid_t process);
// Both.
int run_process(const std::function<void()>& body);

}  // namespace ferry::test
