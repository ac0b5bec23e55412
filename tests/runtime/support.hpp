// Shared by the tests of groups: kinds of groups, checks that work across processes, random numbers.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "base/text.hpp"
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

// ---- The kinds of groups that a test program covers. Threads and processes have separate programs, because
// the thread sanitizer follows only threads: kinds_threads.cpp or kinds_processes.cpp is linked.

extern const std::array<GroupKind, 2> kGroupKinds;

// ---- Checks Rank::all_gather with random bytes.

inline std::vector<unsigned char> part_of(std::uint64_t seed_value, int rank, std::size_t bytes) {
  Random random(seed_value + 1000003 * static_cast<std::uint64_t>(rank));
  std::vector<unsigned char> part(bytes);
  for (unsigned char& byte : part) byte = static_cast<unsigned char>(random());
  return part;
}

inline void check_gather(const Rank& rank, std::uint64_t seed_value, std::size_t bytes) {
  constexpr std::size_t kGuard = 64;
  const std::vector<unsigned char> mine = part_of(seed_value, rank.index(), bytes);
  std::vector<unsigned char> all(rank.size() * bytes + kGuard, 0xA5);
  rank.all_gather(mine.data(), all.data(), bytes);
  for (int peer = 0; peer < rank.size(); ++peer) {
    const std::vector<unsigned char> expected = part_of(seed_value, peer, bytes);
    FERRY_CHECK(bytes == 0 || std::memcmp(all.data() + peer * bytes, expected.data(), bytes) == 0,
                str("rank ", rank.index(), " got wrong bytes of rank ", peer, ", ", bytes, " bytes"));
  }
  for (std::size_t i = 0; i < kGuard; ++i)
    FERRY_CHECK(all[rank.size() * bytes + i] == 0xA5, "bytes past the end were overwritten");
}

// ---- A value in memory that a test shares with the processes of its ranks.

template <class T>
class SharedValue {
 public:
  SharedValue()
      : value_(new(mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) T{}) {
  }
  ~SharedValue() { munmap(value_, sizeof(T)); }
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  T* value_;
};

// Returns when `count` ranks have counted themselves, however long a busy machine makes them take; after 30 s
// in any case.
inline void await_ranks(const SharedValue<std::atomic<int>>& counter, int count) {
  const Stopwatch watch;
  while (*counter < count && watch.seconds() < 30) sleep_seconds(0.01);
}

// ---- Kills a process at a random moment.

// The system kills the calling process after this many microseconds. No thread of the process takes part.
inline void kill_this_process_in(int microseconds) {
  timer_t timer;
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_create(CLOCK_MONOTONIC, &event, &timer);
  const itimerspec when{{0, 0}, {0, 1000L * microseconds}};
  timer_settime(timer, 0, &when, nullptr);
}

}  // namespace ferry::test
