#include "group/control_block.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

#include "base/log.hpp"
#include "base/process.hpp"
#include "base/text.hpp"

namespace ferry {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);

// Not FUTEX_WAIT_PRIVATE: the word may lie in memory shared with other processes.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value, double seconds) noexcept {
  timespec timeout{};
  timeout.tv_sec = static_cast<std::time_t>(seconds);
  timeout.tv_nsec = static_cast<long>((seconds - static_cast<double>(timeout.tv_sec)) * 1e9);
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

struct alignas(64) ControlBlock::Header {
  // The epoch of the failure, then in 32 bits 1 + the reporter whose FailureSlot holds it; 0: none.
  std::atomic<std::uint64_t> failed;
  std::atomic<std::uint32_t> first_failed;  // 1 + the rank that failed first; 0: none
};

struct alignas(64) ControlBlock::RankEntry {
  WakeEvent wake_event;
  std::atomic<std::int32_t> process;
  std::atomic<RankStatus> status;
  LivenessLock liveness_lock;
  ErrorRecord error;  // valid once the status is `failed`
  GatherSlot gather_slot;
  CollectiveProgress progress;
  EngineProgress engine_progress;
};

// A reporter writes its slot in full before Header::failed names it, so a reporter that is killed in between
// leaves no partial failure.
struct alignas(64) ControlBlock::FailureSlot {
  std::atomic<std::uint32_t> claimed;  // epoch of the failure: two threads of a rank may report at once
  ErrorRecord error;
};

std::int64_t ControlBlock::bytes(int ranks) {
  return static_cast<std::int64_t>(sizeof(Header) + ranks * sizeof(RankEntry) +
                                   (ranks + 1) * sizeof(FailureSlot));
}

ControlBlock::Header& ControlBlock::header() const {
  return *reinterpret_cast<Header*>(memory_.data());
}

ControlBlock::RankEntry& ControlBlock::entry(int rank) const {
  return reinterpret_cast<RankEntry*>(memory_.data() + sizeof(Header))[rank];
}

ControlBlock::FailureSlot& ControlBlock::failure_slot(int reporter) const {
  std::byte* slots = memory_.data() + sizeof(Header) + ranks_ * sizeof(RankEntry);
  return reinterpret_cast<FailureSlot*>(slots)[reporter];
}

WakeEvent& ControlBlock::wake_event(int rank) const {
  return entry(rank).wake_event;
}

LivenessLock& ControlBlock::liveness_lock(int rank) const {
  return entry(rank).liveness_lock;
}

GatherSlot& ControlBlock::gather_slot(int rank) const {
  return entry(rank).gather_slot;
}

CollectiveProgress& ControlBlock::progress(int rank) const {
  return entry(rank).progress;
}

EngineProgress& ControlBlock::engine_progress(int rank) const {
  return entry(rank).engine_progress;
}

void ControlBlock::join(int rank) {
  entry(rank).status.store(RankStatus::joined, std::memory_order_relaxed);
  // Release: orders the status before the process number.
  entry(rank).process.store(getpid(), std::memory_order_release);
}

int ControlBlock::process_of(int rank) const {
  return entry(rank).process.load(std::memory_order_acquire);
}

RankStatus ControlBlock::status_of(int rank) const {
  // Acquire: a rank that sees that a peer has ended also sees every flag that the peer stored before.
  return entry(rank).status.load(std::memory_order_acquire);
}

void ControlBlock::wake_all_ranks() noexcept {
  for (int rank = 0; rank < ranks_; ++rank) wake_event(rank).ring();
}

// A process that a rank's process has forked does not.
bool ControlBlock::speaks_for(int rank) const {
  const int process = process_of(rank);
  return process == 0 || process == this_process();
}

void ControlBlock::leave(int rank) noexcept {
  if (!speaks_for(rank)) return;
  entry(rank).status.store(RankStatus::left, std::memory_order_seq_cst);
  wake_all_ranks();
}

void ControlBlock::fail_rank(int rank, const ErrorRecord& error, int reporter) noexcept {
  if (reporter != launcher() && !speaks_for(rank)) return;
  entry(rank).error = error;
  std::uint32_t none = 0;
  // Release: orders the error before the rank's number, because error_of() is read after first_failed_rank().
  header().first_failed.compare_exchange_strong(none, static_cast<std::uint32_t>(rank + 1),
                                                std::memory_order_acq_rel);
  entry(rank).status.store(RankStatus::failed, std::memory_order_seq_cst);

  WaitRecord record;
  record.rank = rank;
  record.peer = rank;
  // The launcher's text already names the rank and how its process ended.
  const std::string prefix = reporter == launcher() ? "" : str("rank ", rank, " ended by an error: ");
  fail(reporter, failure_record(ErrorRecord::Kind::peer_lost, record, prefix + error.text));
}

int ControlBlock::first_failed_rank() const {
  return std::min(reporter_or_rank(header().first_failed.load(std::memory_order_acquire)), ranks_ - 1);
}

ErrorRecord ControlBlock::error_of(int failed_rank) const {
  return checked(entry(failed_rank).error);
}

// What other processes have stored may be damaged, and is used as an index.
int ControlBlock::reporter_or_rank(std::uint32_t number) const {
  return static_cast<int>(std::min(number, static_cast<std::uint32_t>(ranks_) + 1)) - 1;
}

ErrorRecord ControlBlock::checked(ErrorRecord stored) const {
  for (int* rank : {&stored.wait.rank, &stored.wait.peer, &stored.wait.via})
    if (*rank < 0 || *rank >= ranks_) *rank = -1;
  return stored;
}

// Sequentially consistent because WakeEvent requires it: a waiter checks this before it sleeps.
bool ControlBlock::failed() const {
  return header().failed.load(std::memory_order_seq_cst) >> 32 == epoch();
}

// `reporter` is a rank, or `ranks` for the process that has started them.
static void log_failure(int reporter, int ranks, const ErrorRecord& error) noexcept {
  if (!log_enabled()) return;
  try {
    log_line(str("the group has failed: ", error.text, " (reported by ",
                 reporter < ranks ? str("rank ", reporter) : "the launcher", ")"));
  } catch (...) {  // no memory: the failure itself is what matters
    return;
  }
}

void ControlBlock::fail(int reporter, const ErrorRecord& error) noexcept {
  if (failed()) return;
  FailureSlot& slot = failure_slot(reporter);
  if (slot.claimed.exchange(epoch(), std::memory_order_acq_rel) == epoch()) {
    while (!failed()) sched_yield();  // another thread of this rank is about to publish its failure
    return;
  }
  slot.error = error;
  const std::uint64_t failure = std::uint64_t{epoch()} << 32 | static_cast<std::uint32_t>(reporter + 1);
  std::uint64_t before = header().failed.load(std::memory_order_relaxed);
  bool first = false;
  // Release: orders the slot before the number that names it.
  while (!first && before >> 32 != epoch())
    first = header().failed.compare_exchange_weak(before, failure, std::memory_order_seq_cst);
  if (first) log_failure(reporter, ranks_, error);
  wake_all_ranks();
}

ErrorRecord ControlBlock::failure() const {
  const std::uint64_t failed = header().failed.load(std::memory_order_acquire);
  return checked(failure_slot(reporter_or_rank(static_cast<std::uint32_t>(failed))).error);
}

void ControlBlock::throw_failure(WaitRecord waiting, const Topology* topology) const {
  ErrorRecord error = failure();
  std::string prefix, suffix;
  const bool reported_by_this_rank = error.wait.rank == waiting.rank;
  if (!reported_by_this_rank) {
    waiting.peer = error.wait.peer;
    waiting.node = error.wait.node;
    if (waiting.via < 0) waiting.via = error.wait.via;
    error.wait = waiting;
    const std::string role = waiting.role == WaitRole::none ? "" : str(", a ", to_string(waiting.role));
    prefix = str(to_string(waiting.operation), " ", waiting.call, " ended early on rank ", waiting.rank, role,
                 ": ");
  }
  const int named = error.wait.peer >= 0 ? error.wait.peer : error.wait.via;
  if (topology != nullptr && topology->nodes() > 1 && named >= 0 && error.wait.node < 0) {
    error.wait.node = topology->node_of(named);
    suffix = str(" (rank ", named, " is on node ", error.wait.node, ")");
  }
  error.raise_with(prefix + error.message() + suffix);
}

ErrorRecord failure_record(ErrorRecord::Kind kind, const WaitRecord& record, const std::string& text) {
  ErrorRecord error;
  error.kind = kind;
  error.wait = record;
  const std::size_t length = std::min(text.size(), sizeof error.text - 1);
  std::memcpy(error.text, text.data(), length);
  return error;
}

}  // namespace ferry
