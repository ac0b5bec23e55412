// How far the ranks of this host have come with the calls of a lane.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "group/control_block.hpp"

namespace ferry::collective {

// In the control block each rank has an entry for a lane: the lane's number, a call, and a step of it: 2 t
// when it has begun transfer t, and 2 t + 1 when it has finished it. Transfers are numbered from 1. If a
// rank has more lanes than entries, several lanes write one entry, which then holds what the last of them
// wrote.
class CallProgress {
 public:
  // `lane`: RankState::number_lane(). Collective: the entries are valid once all ranks have constructed it.
  CallProgress(ControlBlock& control, int rank, int lane) : control_(control), rank_(rank), lane_(lane) {
    reach(0, 0);
  }

  void reach(std::uint64_t call, int step) const {
    // Release: a rank that reads the entry also sees what this rank did before.
    entry_of(rank_).store(entry(call, step), std::memory_order_release);
  }

  // Whether `peer` has come as far. Empty: unknown, as for every rank of another host.
  std::optional<bool> has_reached(int peer, std::uint64_t call, int step) const {
    const std::uint64_t seen = entry_of(peer).load(std::memory_order_acquire), wanted = entry(call, step);
    if (seen >> kLaneShift != wanted >> kLaneShift) return std::nullopt;
    return seen >= wanted;
  }

 private:
  static constexpr int kLaneShift = 40, kCallShift = 8;  // 24 bits for the lane, 32 for the call, 8

  // Never 0, which is the entry of a rank of another host.
  std::uint64_t entry(std::uint64_t call, int step) const {
    return (static_cast<std::uint64_t>(lane_) + 1) << kLaneShift | (call & 0xFFFFFFFFu) << kCallShift |
           static_cast<std::uint64_t>(std::min(step, 255));
  }
  std::atomic<std::uint64_t>& entry_of(int rank) const {
    EngineProgress& progress = control_.engine_progress(rank);
    return progress.lanes[lane_ % EngineProgress::kLanes];
  }

  ControlBlock& control_;
  const int rank_, lane_;
};

}  // namespace ferry::collective
