#include "group/waiter.hpp"

#include <sched.h>

#include <algorithm>

#include "base/process.hpp"
#include "base/text.hpp"

namespace ferry {

namespace {

// A rank spins only if every rank can have a processor of its own, and only briefly, because the system may
// still have put two ranks on one processor. Yielding to a rank on the same processor costs 2 us; waking a
// sleeper costs 7 us.
constexpr int kSpins = 100;
constexpr int kYields = 50;

// The longest sleep between two checks of the peers' processes. A killed process must be noticed within a
// second. Every other event that ends a wait wakes the sleeper.
constexpr double kMaxSleepSeconds = 0.25;

int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

// A rank that will not post any more, and why; rank -1: none.
struct Waiter::LostPeer {
  int rank = -1;
  std::string reason;
};

Waiter::Waiter(ControlBlock& control, int rank, int local_ranks)
    : control_(control), rank_(rank), spins_(processors() >= local_ranks ? kSpins : 0), monitor_(control) {}

void Waiter::wait(const WaitCondition& condition, const WaitRecord& request, const WaitLimit& limit,
                  int excused) {
  const std::uint64_t value = request.expected;
  if (condition.reached(value) || spin(condition, value)) return;
  WaitRecord record = request;
  while (true) {
    const bool failed = group_failed(excused);
    const LostPeer lost = failed ? LostPeer{} : find_lost_peer(request.peer, excused);
    // Checks the flag after the peers: a peer that posted before it ended has done its part.
    if (condition.reached(value)) return;
    record.observed = std::max(request.observed, condition.flag->load(std::memory_order_relaxed));
    if (failed) break;
    if (lost.rank >= 0) {
      record.peer = lost.rank;
      fail_group(ErrorRecord::Kind::peer_lost, record, lost.reason);
      break;
    }
    const double left = limit.seconds_left();
    if (left <= 0) {
      time_out(record, limit.seconds);
      break;
    }
    if (sleep(condition, value, std::min(left, kMaxSleepSeconds), excused)) return;
    if (check_interrupt(record)) break;
  }
  control_.throw_failure(record);
}

bool Waiter::check_peers(const WaitRecord& request) {
  if (control_.failed()) return true;
  const LostPeer lost = find_lost_peer(request.peer);
  if (lost.rank < 0) return control_.failed();
  WaitRecord record = request;
  record.peer = lost.rank;
  fail_group(ErrorRecord::Kind::peer_lost, record, lost.reason);
  return true;
}

bool Waiter::check_interrupt(const WaitRecord& request) {
  const auto interrupted = interrupt_requested.load();
  if (interrupted == nullptr || !interrupted()) return false;
  const std::string text = str("rank ", rank_, " was interrupted: ", describe(request));
  WaitRecord record = request;
  record.peer = rank_;
  control_.fail(rank_, failure_record(ErrorRecord::Kind::peer_lost, record, text));
  return true;
}

void Waiter::time_out(const WaitRecord& record, double deadline) {
  const std::string missing = record.peer < 0 ? std::string("some rank") : str("rank ", record.peer);
  fail_group(ErrorRecord::Kind::timeout, record, str("no sign of ", missing, " for ", deadline, " s"));
}

bool Waiter::spin(const WaitCondition& condition, std::uint64_t value) const {
  for (int i = 0; i < spins_; ++i) {
    pause_processor();
    if (condition.reached(value)) return true;
  }
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (condition.reached(value)) return true;
  }
  return false;
}

// Returns whether the condition is met. May return false early: after a wake-up, or spuriously.
bool Waiter::sleep(const WaitCondition& condition, std::uint64_t value, double seconds, int excused) {
  bool reached = false;
  // A failure of the group rings too, so it is checked under the same registration as the flag.
  const auto is_over = [&] { return (reached = condition.reached(value)) || group_failed(excused); };
  control_.wake_event(rank_).sleep_unless(is_over, seconds);
  return reached || condition.reached(value);
}

// Whether the group has failed by the loss of another rank than `excused`.
bool Waiter::group_failed(int excused) const {
  return control_.failed() && (excused < 0 || control_.failure().wait.peer != excused);
}

Waiter::LostPeer Waiter::find_lost_peer(int awaited, int excused) {
  const RankStatus status = awaited >= 0 ? control_.status_of(awaited) : RankStatus::joined;
  // A rank that has left is an error only for a rank that waits for it.
  if (status == RankStatus::left) return {awaited, str("rank ", awaited, " has left the group")};
  // A rank that fails also fails the group, which ends every wait; but the group has only its first failure.
  if (excused >= 0 && status == RankStatus::failed) return {awaited, str("rank ", awaited, " has failed")};
  const int dead = monitor_.find_dead_rank(excused);
  if (dead < 0) return {};
  return {dead, death_of(dead)};
}

std::string Waiter::death_of(int rank) const {
  return str("rank ", rank, " (process ", control_.process_of(rank), ") has died");
}

void Waiter::fail_group(ErrorRecord::Kind kind, const WaitRecord& record, const std::string& reason) {
  const bool waited = record.operation != Operation::none;
  control_.fail(rank_, failure_record(kind, record, waited ? str(reason, ": ", describe(record)) : reason));
}

}  // namespace ferry
