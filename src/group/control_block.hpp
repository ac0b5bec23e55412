// What the ranks of a group share: who is there, how they ended, the group's failure, and the place where
// they meet.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "group/error_record.hpp"
#include "group/liveness_lock.hpp"
#include "group/wake_event.hpp"
#include "memory/mapping.hpp"

namespace ferry {

enum class Presence : std::uint32_t { absent = 0, present = 1, left = 2, lost = 3 };

// One rank's seat in all_gather: the number of its last step, and its part of two steps.
struct GatherSlot {
  static constexpr std::size_t kSlotBytes = 4096;

  alignas(64) std::atomic<std::uint64_t> step;
  alignas(64) std::byte slots[2][kSlotBytes];
};

// A view of one block of shared, zeroed memory. Every rank (and the launcher of processes) has its own view.
class GroupControl {
 public:
  static std::int64_t bytes(int ranks);
  GroupControl(Mapping memory, int ranks) : memory_(std::move(memory)), ranks_(ranks) {}

  int ranks() const { return ranks_; }
  WakeEvent& bell(int rank) const;
  GatherSlot& seat(int rank) const;

  void enter(int rank);            // as a thread of the calling process
  int process_of(int rank) const;  // 0 before it has entered
  Presence presence_of(int rank) const;
  RobustLock& lock(int rank) const;  // held by the rank's process; see ProcessWatch

  // The rank has ended, well or by an error; the latter fails the group. Both wake everybody.
  void leave(int rank) noexcept;
  void lose(int rank, const ErrorRecord& error, int reporter) noexcept;

  int first_lost() const;  // the rank that was lost first, or -1
  const ErrorRecord& error_of(int lost_rank) const;

  // The group's failure is final: the first one stands. `reporter` is a rank, or launcher().
  bool failed() const;
  void fail(int reporter, const ErrorRecord& error) noexcept;
  const ErrorRecord& failure() const;  // once failed()
  int launcher() const { return ranks_; }

  // Throws the failure as the rank of `asking` meets it: same type, the asker's own record with the culprit
  // as peer.
  [[noreturn]] void throw_failure(WaitRecord asking) const;

 private:
  struct Header;
  struct Entry;
  struct FailureSlot;

  Header& header() const;
  Entry& entry(int rank) const;
  FailureSlot& failure_slot(int reporter) const;
  void ring_all() noexcept;

  Mapping memory_;
  int ranks_;
};

// A failure record for `record.peer`, of the type that `kind` says.
ErrorRecord failure_record(ErrorRecord::Kind kind, const WaitRecord& record, const std::string& text);

}  // namespace ferry
