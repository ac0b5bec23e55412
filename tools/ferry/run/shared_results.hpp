// The memory in which the ranks of a `ferry run` leave their results for the process that started them.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "base/mapping.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/common/dispatch_check.hpp"
#include "tools/report/run_report.hpp"

namespace ferry::app {

// Results of one rank. All zeros is the initial state.
struct RankResults {
  CheckCounter dispatch, combine;  // scaling experts, compared bit for bit
  CheckCounter dense;              // SwiGLU experts, compared with fp32 within a tolerance
  CheckCounter repeated;           // timed results compared with the checked ones

  // Over the timed steps:
  std::int64_t rows = 0;         // received, without padding
  std::int64_t stored_rows = 0;  // the same; expert_indexed: its rows, where `rows` are positions
  std::int64_t dispatch_wire_bytes = 0, dispatch_messages = 0;
  std::int64_t combine_wire_bytes = 0, combine_messages = 0;
  std::int64_t dispatch_bytes_between_nodes = 0, combine_bytes_between_nodes = 0;
};

// One anonymous mapping that threads and forked processes share, created before the ranks start. Each rank
// writes its own entries; rank 0 writes the numbers that all ranks know. Read it after all ranks have ended.
//
// Layout: RankResults [ranks]; StepTimes [steps][ranks]; dropped routes; dispatch messages [ranks][ranks];
// entries of dispatch messages [ranks][ranks]; combine messages [ranks][ranks]; routes [experts].
class SharedResults {
 public:
  SharedResults(int ranks, int steps, int experts)
      : ranks_(ranks),
        steps_(steps),
        experts_(experts),
        memory_(Mapping::anonymous_shared(results_bytes() + times_bytes() +
                                          (1 + 3 * pairs() + std::int64_t{experts}) * 8)) {}

  // Collective. For ranks that share no memory: every rank gets the results and times of all.
  void gather(const Rank& me) const {
    const RankResults mine = rank(me.index());
    me.all_gather(&mine, memory_.data(), sizeof mine);
    std::vector<report::StepTimes> own_times, all_times(step_times().size());
    for (int step = 0; step < steps_; ++step) own_times.push_back(times(step, me.index()));
    me.all_gather(own_times.data(), all_times.data(), own_times.size() * sizeof own_times[0]);
    for (std::size_t i = 0; i < all_times.size(); ++i)
      times(static_cast<int>(i % at(steps_)), static_cast<int>(i / at(steps_))) = all_times[i];
  }

  RankResults& rank(int rank) const { return reinterpret_cast<RankResults*>(memory_.data())[rank]; }
  report::StepTimes& times(int step, int rank) const { return step_times()[at(step * ranks_ + rank)]; }

  // [steps][ranks]
  std::span<report::StepTimes> step_times() const {
    return {reinterpret_cast<report::StepTimes*>(memory_.data() + results_bytes()), at(steps_) * at(ranks_)};
  }
  // [ranks][ranks]: from, to. The diagonal is local.
  std::span<std::int64_t> dispatch_messages() const { return {numbers(1), at(pairs())}; }
  std::span<std::int64_t> combine_messages() const { return {numbers(1 + pairs()), at(pairs())}; }
  // Ranks that the messages to a relay are for.
  std::span<std::int64_t> dispatch_entries() const { return {numbers(1 + 2 * pairs()), at(pairs())}; }
  // [experts]
  std::span<std::int64_t> routes() const { return {numbers(1 + 3 * pairs()), at(experts_)}; }
  std::int64_t& dropped() const { return *numbers(0); }

 private:
  std::int64_t pairs() const { return std::int64_t{ranks_} * ranks_; }
  std::int64_t results_bytes() const { return ranks_ * static_cast<std::int64_t>(sizeof(RankResults)); }
  std::int64_t times_bytes() const {
    return std::int64_t{steps_} * ranks_ * static_cast<std::int64_t>(sizeof(report::StepTimes));
  }
  std::int64_t* numbers(std::int64_t index) const {
    return reinterpret_cast<std::int64_t*>(memory_.data() + results_bytes() + times_bytes()) + index;
  }

  int ranks_, steps_, experts_;
  Mapping memory_;
};

static_assert(std::is_trivially_copyable_v<RankResults> && std::is_trivially_copyable_v<report::StepTimes>);

}  // namespace ferry::app
