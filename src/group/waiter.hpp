// How a rank waits for a flag in shared memory: spin, yield, then sleep, checking the peers and the deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "ferry/error.hpp"
#include "group/control_block.hpp"
#include "group/liveness.hpp"

namespace ferry {

// Returns whether the calling thread should give up its wait, for example after Ctrl-C. Null: never. A wait
// calls it four times a second and after every signal; waits shorter than that never do. Set once for the
// process, by a language binding.
inline std::atomic<bool (*)()> interrupt_requested = nullptr;

// Met when `flag` has reached a value, or when `alternative` has (null: no alternative).
struct WaitCondition {
  const std::atomic<std::uint64_t>* flag;
  const std::atomic<std::uint64_t>* alternative = nullptr;

  // Acquire: what the peer wrote before it stored the flag may be read afterwards. Sequentially consistent
  // because WakeEvent requires it.
  bool reached(std::uint64_t value) const {
    return flag->load(std::memory_order_seq_cst) >= value ||
           (alternative != nullptr && alternative->load(std::memory_order_seq_cst) >= value);
  }
};

// How long waits may last: `seconds`, counted from `since`. Waits for several peers, one after the other,
// share a limit, so that together they last no longer than one of them.
struct WaitLimit {
  using Clock = std::chrono::steady_clock;

  double seconds;
  Clock::time_point since = Clock::now();

  double seconds_left() const {
    return seconds - std::chrono::duration<double>(Clock::now() - since).count();
  }
};

class Waiter {
 public:
  // `local_ranks`: how many ranks share this host's processors.
  Waiter(ControlBlock& control, int rank, int local_ranks);

  // Blocks until the condition has reached record.expected. Threads of several lanes may wait at once. The
  // loss of rank `excused` (-1: none) does not end the wait: it has done its part of what is waited for.
  //
  // @throws TimeoutError   the limit has passed
  // @throws PeerLostError  a process has died, record.peer has left, or interrupt_requested() returned true
  //
  // Each of these fails the group. If the group has failed already, throws that failure.
  void wait(const WaitCondition& condition, const WaitRecord& record, const WaitLimit& limit,
            int excused = -1);

  // Checks the peers once, for code that waits by other means. Returns whether the group has failed, for any
  // reason. If a process has died, or record.peer (-1: none) has left, fails the group with `record` and the
  // missing rank as its peer; Operation::none: nothing was being waited for. Never blocks. Any thread.
  bool check_peers(const WaitRecord& record);

  // Fails the group if the thread should give up the wait in `record`; returns whether it should.
  bool check_interrupt(const WaitRecord& record);

  // Fails the group: the wait in `record` has exceeded `deadline` seconds. Any thread.
  void time_out(const WaitRecord& record, double deadline);

 private:
  struct LostPeer;

  bool spin(const WaitCondition& condition, std::uint64_t value) const;
  bool sleep(const WaitCondition& condition, std::uint64_t value, double seconds, int excused);
  bool group_failed(int excused) const;
  LostPeer find_lost_peer(int awaited, int excused = -1);
  std::string death_of(int rank) const;
  void fail_group(ErrorRecord::Kind kind, const WaitRecord& record, const std::string& reason);

  ControlBlock& control_;
  int rank_;
  int spins_;
  ProcessMonitor monitor_;
};

}  // namespace ferry
