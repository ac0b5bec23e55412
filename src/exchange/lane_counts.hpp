// What the calls of a host backend's lane have counted: routes, messages and bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "ferry/exchange.hpp"

namespace ferry {

// The lane's calls write it, one at a time; any thread may read it meanwhile.
class LaneCounts {
 public:
  explicit LaneCounts(int experts) : routes_(static_cast<std::size_t>(experts), 0) {}

  // `counts` [R, E]: routes of every rank to every expert.
  void count_dispatch(std::span<const std::int32_t> counts) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < counts.size(); ++i) routes_[i % routes_.size()] += counts[i];
    ++dispatches_;
  }
  void count_dispatch_messages(std::int64_t messages, std::int64_t bytes) {
    add(dispatch_messages_, messages);
    add(dispatch_bytes_, bytes);
  }
  void count_combine_messages(std::int64_t messages, std::int64_t bytes) {
    add(combine_messages_, messages);
    add(combine_bytes_, bytes);
  }

  // `sum` has room for every expert and rank.
  void add_to(const Placement& placement, LoadCounts& sum) const {
    const std::lock_guard lock(mutex_);
    for (std::size_t expert = 0; expert < routes_.size(); ++expert) {
      const int rank = placement.location(static_cast<int>(expert)).rank;
      sum.experts[expert] += routes_[expert];
      sum.ranks[static_cast<std::size_t>(rank)] += routes_[expert];
    }
    sum.dispatches += dispatches_;
  }
  void add_to(WireCounts& sum) const {
    sum.dispatch_messages += dispatch_messages_.load(std::memory_order_relaxed);
    sum.dispatch_bytes += dispatch_bytes_.load(std::memory_order_relaxed);
    sum.combine_messages += combine_messages_.load(std::memory_order_relaxed);
    sum.combine_bytes += combine_bytes_.load(std::memory_order_relaxed);
  }

 private:
  using Counter = std::atomic<std::int64_t>;

  // One thread writes at a time, so no read-modify-write is needed, which would cost more than a row's tail.
  static void add(Counter& counter, std::int64_t number) {
    counter.store(counter.load(std::memory_order_relaxed) + number, std::memory_order_relaxed);
  }

  mutable std::mutex mutex_;          // so that the routes of a dispatch are counted whole
  std::vector<std::int64_t> routes_;  // [E] from all ranks
  std::int64_t dispatches_ = 0;
  Counter dispatch_messages_ = 0, dispatch_bytes_ = 0, combine_messages_ = 0, combine_bytes_ = 0;
};

// Counts of nothing yet, with room for every expert and rank.
inline LoadCounts no_load(const Placement& placement) {
  return {.experts = std::vector<std::int64_t>(static_cast<std::size_t>(placement.experts()), 0),
          .ranks = std::vector<std::int64_t>(static_cast<std::size_t>(placement.ranks()), 0)};
}

}  // namespace ferry
