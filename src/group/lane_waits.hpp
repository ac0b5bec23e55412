// Adds up how long the calls of a host backend's lane wait for each peer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/calls.hpp"
#include "ferry/error.hpp"

namespace ferry {

// The lane's calls write it, one at a time; any thread may read it meanwhile.
class LaneWaits {
 public:
  using Clock = std::chrono::steady_clock;

  // 0 ranks: nothing is counted.
  explicit LaneWaits(int ranks) : counters_(2 * static_cast<std::size_t>(ranks)) {}

  bool on() const { return !counters_.empty(); }

  void add(Operation operation, int peer, Clock::duration waited) {
    std::atomic<std::int64_t>& counter =
        counters_[static_cast<std::size_t>(peer) + (returns(operation) ? ranks() : 0)];
    const std::int64_t more = std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
    // One thread writes at a time, so no read-modify-write is needed.
    counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }

  // `sum` has room for every rank.
  void add_to(WaitTimes& sum) const {
    if (!on()) return;
    for (std::size_t peer = 0; peer < ranks(); ++peer) {
      sum.dispatch[peer] += counters_[peer].load(std::memory_order_relaxed);
      sum.combine[peer] += counters_[ranks() + peer].load(std::memory_order_relaxed);
    }
  }

 private:
  static bool returns(Operation operation) {
    return operation == Operation::combine || operation == Operation::return_values ||
           operation == Operation::reduce_scatter_v;
  }
  std::size_t ranks() const { return counters_.size() / 2; }

  std::vector<std::atomic<std::int64_t>> counters_;  // [2, R] nanoseconds: dispatch, combine
};

// Counts its own lifetime as a wait for `peer`.
class CountedWait {
 public:
  CountedWait(LaneWaits& waits, Operation operation, int peer)
      : waits_(waits), operation_(operation), peer_(peer) {
    if (waits_.on()) begin_ = LaneWaits::Clock::now();
  }
  ~CountedWait() {
    if (waits_.on()) waits_.add(operation_, peer_, LaneWaits::Clock::now() - begin_);
  }
  CountedWait(const CountedWait&) = delete;
  CountedWait& operator=(const CountedWait&) = delete;

 private:
  LaneWaits& waits_;
  const Operation operation_;
  const int peer_;
  LaneWaits::Clock::time_point begin_{};
};

}  // namespace ferry
