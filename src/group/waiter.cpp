#include "group/waiter.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "base/text.hpp"

namespace ferry {

namespace {

using Clock = std::chrono::steady_clock;

// Spinning is for ranks that have a processor each, and short, as the system may have put two of them on one
// all the same. Yielding to a rank on the same processor costs 2 us; waking a sleeper 7.
constexpr int kSpins = 100;
constexpr int kYields = 50;

// The longest sleep between two looks at the peers' processes: half of the second in which a killed one is
// noticed. Everything else that ends a wait rings.
constexpr double kSlice = 0.25;

int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// A rank that will post nothing any more, and what has become of it; rank -1: none.
struct Waiter::Loss {
  int rank = -1;
  std::string reason;
};

Waiter::Waiter(GroupControl& control, int rank, int local_ranks)
    : control_(control), rank_(rank), spins_(processors() >= local_ranks ? kSpins : 0), watch_(control) {}

void Waiter::wait(const Signal& signal, const WaitRecord& asked, double deadline) {
  const std::uint64_t value = asked.expected;
  if (signal.reached(value) || spin(signal, value)) return;
  WaitRecord record = asked;
  for (const Clock::time_point start = Clock::now();;) {
    const bool failed = control_.failed();
    const Loss loss = failed ? Loss{} : find_loss(asked.peer);
    // Looked at again after these: a peer that posted before it ended has done its part.
    if (signal.reached(value)) return;
    record.seen = std::max(asked.seen, signal.flag->load(std::memory_order_relaxed));
    if (failed) break;
    if (loss.rank >= 0) {
      record.peer = loss.rank;
      fail(ErrorRecord::Kind::peer_lost, record, loss.reason);
      break;
    }
    const double left = deadline - seconds_since(start);
    if (left <= 0) {
      time_out(record, deadline);
      break;
    }
    if (sleep(signal, value, std::min(left, kSlice))) return;
    const auto unwanted = wait_is_unwanted.load();
    if (unwanted != nullptr && unwanted()) {
      const std::string text = str("rank ", rank_, " was interrupted: ", describe(record));
      record.peer = rank_;
      control_.fail(rank_, failure_record(ErrorRecord::Kind::peer_lost, record, text));
      break;
    }
  }
  control_.throw_failure(record);
}

void Waiter::require_process(const WaitRecord& record) {
  // A process loses its files some time before it counts as ended.
  constexpr int kEndingMilliseconds = 500;
  if (!watch_.ends_within(record.peer, kEndingMilliseconds)) return;
  fail(ErrorRecord::Kind::peer_lost, record, death_of(record.peer));
  control_.throw_failure(record);
}

bool Waiter::look(const WaitRecord& asked) {
  if (control_.failed()) return true;
  const Loss loss = find_loss(asked.peer);
  if (loss.rank < 0) return control_.failed();
  WaitRecord record = asked;
  record.peer = loss.rank;
  fail(ErrorRecord::Kind::peer_lost, record, loss.reason);
  return true;
}

void Waiter::time_out(const WaitRecord& record, double deadline) {
  fail(ErrorRecord::Kind::timeout, record, str("no sign of rank ", record.peer, " for ", deadline, " s"));
}

bool Waiter::spin(const Signal& signal, std::uint64_t value) const {
  for (int i = 0; i < spins_; ++i) {
    pause();
    if (signal.reached(value)) return true;
  }
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (signal.reached(value)) return true;
  }
  return false;
}

// True if the signal is there. False after a ring, the given time, or for no reason.
bool Waiter::sleep(const Signal& signal, std::uint64_t value, double seconds) {
  WakeEvent& bell = control_.bell(rank_);
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t rings = bell.rings.load(std::memory_order_seq_cst);
  // A failure rings too, so it is looked at under the same registration as the flag.
  const bool reached = signal.reached(value);
  if (!reached && !control_.failed()) futex_wait(bell.rings, rings, seconds);
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return reached || signal.reached(value);
}

Waiter::Loss Waiter::find_loss(int peer) {
  // A rank that has left is missing only to those who wait for it.
  if (peer >= 0 && control_.presence_of(peer) == Presence::left)
    return {peer, str("rank ", peer, " has left the group")};
  const int ended = watch_.find_device_error();
  if (ended < 0) return {};
  return {ended, death_of(ended)};
}

std::string Waiter::death_of(int rank) const {
  return str("rank ", rank, " (process ", control_.process_of(rank), ") has died");
}

void Waiter::fail(ErrorRecord::Kind kind, const WaitRecord& record, const std::string& reason) {
  const bool waited = record.operation != Operation::none;
  control_.fail(rank_, failure_record(kind, record, waited ? str(reason, ": ", describe(record)) : reason));
}

}  // namespace ferry
