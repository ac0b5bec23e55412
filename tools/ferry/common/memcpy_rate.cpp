#include "tools/ferry/common/memcpy_rate.hpp"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "memory/local.hpp"
#include "tools/ferry/common/machine.hpp"

namespace ferry::app {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kLeastBytes = 64LL << 20;  // of all buffers together
constexpr int kLeastRounds = 5;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Source and target of one thread.
struct Pair {
  explicit Pair(std::int64_t bytes) : source(bytes), target(bytes) {
    std::memset(source.data(), 1, static_cast<std::size_t>(bytes));
    std::memset(target.data(), 2, static_cast<std::size_t>(bytes));
  }
  LocalMemory source, target;
};

}  // namespace

double measure_memcpy(int threads, double seconds) {
  const std::int64_t bytes = std::max(kLeastBytes, 4 * cache_bytes()) / 2 / threads;
  std::vector<double> rounds;
  Clock::time_point start, round_start;
  bool done = false;
  // Ends a round and begins the next, while all threads stand still.
  auto turn = [&]() noexcept {
    const Clock::time_point now = Clock::now();
    if (round_start == Clock::time_point{}) {
      start = now;
    } else {
      rounds.push_back(std::chrono::duration<double>(now - round_start).count());
    }
    done = rounds.size() >= kLeastRounds && seconds_since(start) > seconds;
    round_start = Clock::now();
  };
  std::barrier meet(threads, turn);
  auto work = [&] {
    const Pair pair(bytes);
    std::memcpy(pair.target.data(), pair.source.data(), static_cast<std::size_t>(bytes));
    while (true) {
      meet.arrive_and_wait();
      if (done) return;
      std::memcpy(pair.target.data(), pair.source.data(), static_cast<std::size_t>(bytes));
    }
  };
  rounds.reserve(1U << 16);
  std::vector<std::jthread> workers;
  for (int i = 0; i < threads; ++i) workers.emplace_back(work);
  workers.clear();  // joins
  std::nth_element(rounds.begin(), rounds.begin() + static_cast<std::ptrdiff_t>(rounds.size() / 2),
                   rounds.end());
  return 2.0 * static_cast<double>(bytes) * threads / rounds[rounds.size() / 2];
}

}  // namespace ferry::app
