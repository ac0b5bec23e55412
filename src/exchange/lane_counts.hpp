// Counts over the calls of a host backend's lane: routes, messages and bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "ferry/exchange.hpp"

namespace ferry {

// Messages to other ranks.
struct Traffic {
  std::int64_t messages = 0, bytes = 0;
};

// The lane's calls write it, one at a time; any thread may read it meanwhile.
class LaneCounts {
 public:
  explicit LaneCounts(int experts) : routes_(static_cast<std::size_t>(experts), 0) {}

  // `counts` [R, E]: routes of every rank to every expert.
  void count_routes(std::span<const std::int32_t> counts) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < counts.size(); ++i) routes_[i % routes_.size()] += counts[i];
    ++dispatches_;
  }
  // `between_nodes`: to ranks of other nodes.
  void count_dispatch(const Traffic& sent, bool between_nodes) {
    dispatch_.add(sent);
    if (between_nodes) dispatch_between_nodes_.add(sent);
  }
  void count_combine(const Traffic& sent, bool between_nodes) {
    combine_.add(sent);
    if (between_nodes) combine_between_nodes_.add(sent);
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
    dispatch_.add_to(sum.dispatch_messages, sum.dispatch_bytes);
    combine_.add_to(sum.combine_messages, sum.combine_bytes);
    dispatch_between_nodes_.add_to(sum.between_nodes.dispatch_messages, sum.between_nodes.dispatch_bytes);
    combine_between_nodes_.add_to(sum.between_nodes.combine_messages, sum.between_nodes.combine_bytes);
  }

 private:
  using Counter = std::atomic<std::int64_t>;

  struct Counters {
    Counter messages = 0, bytes = 0;

    void add(const Traffic& more) {
      add(messages, more.messages);
      add(bytes, more.bytes);
    }
    void add_to(std::int64_t& all_messages, std::int64_t& all_bytes) const {
      all_messages += messages.load(std::memory_order_relaxed);
      all_bytes += bytes.load(std::memory_order_relaxed);
    }

   private:
    // One thread writes at a time, so no read-modify-write is needed, which would cost more than a row's
    // tail.
    static void add(Counter& counter, std::int64_t number) {
      counter.store(counter.load(std::memory_order_relaxed) + number, std::memory_order_relaxed);
    }
  };

  mutable std::mutex mutex_;          // so that the routes of a dispatch are counted whole
  std::vector<std::int64_t> routes_;  // [E] from all ranks
  std::int64_t dispatches_ = 0;
  Counters dispatch_, combine_, dispatch_between_nodes_, combine_between_nodes_;
};

// Counts of nothing yet, with room for every expert and rank.
inline LoadCounts no_load(const Placement& placement) {
  return {.experts = std::vector<std::int64_t>(static_cast<std::size_t>(placement.experts()), 0),
          .ranks = std::vector<std::int64_t>(static_cast<std::size_t>(placement.ranks()), 0)};
}

}  // namespace ferry
