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
  explicit LaneCounts(int experts, int layers = 1)
      : experts_(static_cast<std::size_t>(experts)),
        routes_(experts_ * static_cast<std::size_t>(layers), 0) {}

  // `counts` [R, E]: routes of every rank to every expert, in a dispatch of `layer`.
  void count_routes(int layer, std::span<const std::int32_t> counts) {
    const std::lock_guard lock(mutex_);
    const std::size_t first = static_cast<std::size_t>(layer) * experts_;
    for (std::size_t i = 0; i < counts.size(); ++i) routes_[first + i % experts_] += counts[i];
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

  // Adds routes by layer.
  void add_to(LoadCounts& sum) const {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < routes_.size(); ++i) sum.layers[i] += routes_[i];
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
  const std::size_t experts_;         // E
  std::vector<std::int64_t> routes_;  // [layers, E] from all ranks
  std::int64_t dispatches_ = 0;
  Counters dispatch_, combine_, dispatch_between_nodes_, combine_between_nodes_;
};

// Counts of nothing yet, with room for every layer, expert and rank.
inline LoadCounts no_load(const Config& config) {
  const auto experts = static_cast<std::size_t>(config.experts);
  return {.experts = std::vector<std::int64_t>(experts, 0),
          .layers = std::vector<std::int64_t>(experts * static_cast<std::size_t>(config.layers), 0),
          .ranks = std::vector<std::int64_t>(static_cast<std::size_t>(config.placement.ranks()), 0)};
}

// Sums up the routes by layer to those of experts and, without replicas and slices, of ranks.
inline void add_up_layers(const Placement& placement, LoadCounts& load) {
  for (std::size_t i = 0; i < load.layers.size(); ++i) {
    const std::size_t expert = i % load.experts.size();
    load.experts[expert] += load.layers[i];
    load.ranks[static_cast<std::size_t>(placement.location(static_cast<int>(expert)).rank)] += load.layers[i];
  }
}

}  // namespace ferry
