#include "tools/ferry/run/shared_results.hpp"

namespace ferry::app {

namespace {

std::int64_t results_bytes(std::int64_t ranks) {
  return ranks * static_cast<std::int64_t>(sizeof(RankResults));
}

std::int64_t times_bytes(std::int64_t ranks, std::int64_t steps) {
  return steps * ranks * static_cast<std::int64_t>(sizeof(report::StepTimes));
}

// Dropped routes, two matrices, routes of every expert.
std::int64_t numbers_bytes(std::int64_t ranks, std::int64_t experts) {
  return (1 + 2 * ranks * ranks + experts) * 8;
}

}  // namespace

Board::Board(int ranks, int steps, int experts)
    : ranks_(ranks),
      steps_(steps),
      experts_(experts),
      memory_(Mapping::anonymous_shared(results_bytes(ranks) + times_bytes(ranks, steps) +
                                        numbers_bytes(ranks, experts))) {}

std::span<RankResults> Board::results() const {
  return {reinterpret_cast<RankResults*>(memory_.data()), static_cast<std::size_t>(ranks_)};
}

std::span<report::StepTimes> Board::all_times() const {
  std::byte* begin = memory_.data() + results_bytes(ranks_);
  return {reinterpret_cast<report::StepTimes*>(begin),
          static_cast<std::size_t>(steps_) * static_cast<std::size_t>(ranks_)};
}

std::int64_t* Board::numbers(std::int64_t index) const {
  std::byte* begin = memory_.data() + results_bytes(ranks_) + times_bytes(ranks_, steps_);
  return reinterpret_cast<std::int64_t*>(begin) + index;
}

std::span<std::int64_t> Board::dispatch_messages() const {
  return {numbers(1), static_cast<std::size_t>(ranks_) * static_cast<std::size_t>(ranks_)};
}

std::span<std::int64_t> Board::combine_messages() const {
  return {numbers(1 + std::int64_t{ranks_} * ranks_), dispatch_messages().size()};
}

std::span<std::int64_t> Board::routes() const {
  return {numbers(1 + 2 * std::int64_t{ranks_} * ranks_), static_cast<std::size_t>(experts_)};
}

}  // namespace ferry::app
