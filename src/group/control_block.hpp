// The shared memory through which the ranks of a group on one host meet: each rank's status, the group's
// failure, the slots of all_gather, and the events on which ranks sleep. There are entries for all ranks of
// the group; those of ranks on other hosts stay zero.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/errors.hpp"
#include "base/mapping.hpp"
#include "ferry/topology.hpp"
#include "group/liveness.hpp"

namespace ferry {

// Every change of the ranks of a group, or of a placement, begins a new epoch. Call headers, failures and the
// threads that watch for them carry it.
inline constexpr std::uint32_t kFirstEpoch = 1;

// Sleeps while `word` holds `value`, for at most `seconds`. Spurious wake-ups are possible.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value, double seconds) noexcept;
void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept;

// Wakes the sleeping threads of one rank. Zero bytes are a valid initial state.
//
// The waiter increments `sleepers`, loads `rings`, checks its flag, and sleeps while `rings` keeps the loaded
// value. The peer stores the flag, then calls ring(), which loads `sleepers`. No wake-up is lost: the
// increment, the load of `rings`, the check of the flag, the flag's store and the load of `sleepers` are all
// sequentially consistent, so either the waiter sees the flag or the peer sees the waiter.
struct alignas(64) WakeEvent {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;

  void ring() noexcept {
    if (sleepers.load(std::memory_order_seq_cst) == 0) return;
    rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(rings);
  }

  // The waiter's part: sleeps for at most `seconds`, but not if ready(), which must not throw, returns true.
  template <class Ready>
  void sleep_unless(const Ready& ready, double seconds) noexcept {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t loaded = rings.load(std::memory_order_seq_cst);
    if (!ready()) futex_wait(rings, loaded, seconds);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

enum class RankStatus : std::uint32_t {
  not_joined = 0,
  joined = 1,
  left = 2,    // announced its departure, or returned from its body
  failed = 3,  // ended by an exception, or its process died
};

// One rank's contribution to all_gather: the number of its last step, and its data of two steps.
struct GatherSlot {
  static constexpr std::size_t kPartBytes = 4096;

  alignas(64) std::atomic<std::uint64_t> step;
  std::uint64_t bytes[2];  // of the whole collectives; 0: a barrier
  alignas(64) std::byte parts[2][kPartBytes];
};

// How far a rank has come with the collectives of a group over several hosts: the numbers of the last one
// that it has called, and of the last one that has returned.
struct CollectiveProgress {
  alignas(64) std::atomic<std::uint64_t> begun;
  std::atomic<std::uint64_t> done;
};

// How far a rank has come with calls whose messages an engine carries, by lane. CallProgress says
// what an entry holds.
struct EngineProgress {
  static constexpr int kLanes = 64;

  alignas(64) std::atomic<std::uint64_t> lanes[kLanes];
};

// A view of one block of shared memory that was zero before the first rank joined. Every rank has its own
// view, and so does the launcher that forks processes.
class ControlBlock {
 public:
  static std::int64_t bytes(int ranks);
  ControlBlock(Mapping memory, int ranks) : memory_(std::move(memory)), ranks_(ranks) {}

  int ranks() const { return ranks_; }
  WakeEvent& wake_event(int rank) const;
  GatherSlot& gather_slot(int rank) const;
  CollectiveProgress& progress(int rank) const;
  EngineProgress& engine_progress(int rank) const;

  void join(int rank);             // the calling process runs this rank
  int process_of(int rank) const;  // 0 before the rank has joined
  RankStatus status_of(int rank) const;
  LivenessLock& liveness_lock(int rank) const;  // held by the rank's process; see ProcessMonitor

  // Records that the rank has ended, and wakes every rank. fail_rank() also fails the group. Both do
  // nothing in a process forked from the rank's. The launcher may report any rank with fail_rank().
  void leave(int rank) noexcept;
  void fail_rank(int rank, const ErrorRecord& error, int reporter) noexcept;

  int first_failed_rank() const;  // -1: none
  ErrorRecord error_of(int failed_rank) const;

  std::uint32_t epoch() const { return kFirstEpoch; }
  // Fails the group in this epoch: failures of an earlier one are over. Final: later failures are ignored.
  // `reporter` is a rank, or launcher().
  void fail(int reporter, const ErrorRecord& error) noexcept;
  bool failed() const;
  ErrorRecord failure() const;  // valid once failed()
  int launcher() const { return ranks_; }

  // Throws the type and culprit (WaitRecord::peer, via) of the failure; other fields are those of `waiting`.
  // `topology`: of a call that crosses nodes, whose error also names the culprit's node.
  [[noreturn]] void throw_failure(WaitRecord waiting, const Topology* topology = nullptr) const;

 private:
  struct Header;
  struct RankEntry;
  struct FailureSlot;

  int reporter_or_rank(std::uint32_t number) const;
  ErrorRecord checked(ErrorRecord stored) const;
  Header& header() const;
  RankEntry& entry(int rank) const;
  FailureSlot& failure_slot(int reporter) const;
  bool speaks_for(int rank) const;
  void wake_all_ranks() noexcept;

  Mapping memory_;
  int ranks_;
};

// The record of a failure of type `kind` that `record.peer` caused. Text that is too long is cut.
ErrorRecord failure_record(ErrorRecord::Kind kind, const WaitRecord& record, const std::string& text);

}  // namespace ferry
