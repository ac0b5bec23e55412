// How far the ranks of this host have come with the calls of a lane.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "group/control_block.hpp"

namespace ferry::collective {

// In the control block each rank has an entry for a lane: the lane's number, a call, and a step of it: 0 when
// it has posted the call, 2 t when it has begun transfer t, 2 t + 1 when it has the blocks of transfer t, and
// kDone when it has done its part of the call. Transfers are numbered from 1. If a rank has more lanes than
// entries, several lanes write one entry, which then holds what the last of them wrote.
class CallProgress {
 public:
  static constexpr int kDone = 255;

  // `lane`: RankState::number_lane(). Collective: the entries are valid once all ranks have constructed it.
  CallProgress(ControlBlock& control, int rank, int lane) : control_(control), rank_(rank), lane_(lane) {
    reach(0, 0);
  }

  void reach(std::uint64_t call, int step) const {
    // Release: a rank that reads the entry also sees what this rank did before.
    entry_of(rank_).store(entry(call, step), std::memory_order_release);
  }

  // This rank makes no more calls on the lane.
  void end() const {
    std::atomic<std::uint64_t>& mine = entry_of(rank_);
    std::uint64_t last = mine.load(std::memory_order_relaxed);
    // Another thread may write the entry for another lane.
    while (is_of_lane(last) && !mine.compare_exchange_weak(last, last | kEnded, std::memory_order_acq_rel)) {
    }
  }

  // True if `peer` makes no more calls on the lane and has not posted `call`.
  bool has_ended_before(int peer, std::uint64_t call) const {
    const std::uint64_t seen = entry_of(peer).load(std::memory_order_acquire);
    return is_of_lane(seen) && (seen & kEnded) != 0 && place_of(seen) < place_of(entry(call, 0));
  }

  // Orders ranks by how far they have come. Empty: unknown, as for every rank of another host.
  std::optional<std::uint64_t> place(int peer) const {
    const std::uint64_t seen = entry_of(peer).load(std::memory_order_acquire);
    if (!is_of_lane(seen)) return std::nullopt;
    return place_of(seen);
  }
  // True if `peer` is known to be in a call.
  bool is_in_call(int peer) const {
    const std::optional<std::uint64_t> seen = place(peer);
    return seen && *seen >> kCallShift > 0 && (*seen & kStepMask) != kDone;
  }

  // True if `peer` has reached that step of that call, or a later one. Empty: unknown.
  std::optional<bool> has_reached(int peer, std::uint64_t call, int step) const {
    const std::optional<std::uint64_t> seen = place(peer);
    if (!seen) return std::nullopt;
    return *seen >= place_of(entry(call, step));
  }

 private:
  // 23 bits for the lane, one for kEnded, 32 for the call, 8 for the step.
  static constexpr int kLaneShift = 41, kCallShift = 8;
  static constexpr std::uint64_t kEnded = std::uint64_t{1} << 40, kStepMask = 0xFF;

  // Never 0, which is the entry of a rank of another host.
  std::uint64_t entry(std::uint64_t call, int step) const {
    return (static_cast<std::uint64_t>(lane_) + 1) << kLaneShift | (call & 0xFFFFFFFFu) << kCallShift |
           static_cast<std::uint64_t>(step == kDone ? kDone : std::min(step, kDone - 1));
  }
  bool is_of_lane(std::uint64_t seen) const { return seen >> kLaneShift == entry(0, 0) >> kLaneShift; }
  static constexpr std::uint64_t place_of(std::uint64_t seen) { return seen & (kEnded - 1); }
  std::atomic<std::uint64_t>& entry_of(int rank) const {
    EngineProgress& progress = control_.engine_progress(rank);
    return progress.lanes[lane_ % EngineProgress::kLanes];
  }

  ControlBlock& control_;
  const int rank_, lane_;
};

}  // namespace ferry::collective
