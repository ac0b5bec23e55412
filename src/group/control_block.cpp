#include "group/control_block.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/text.hpp"

namespace ferry {

struct alignas(64) GroupControl::Header {
  std::atomic<std::uint32_t> failed;  // 1 + the reporter whose slot holds the failure
  std::atomic<std::uint32_t> lost;    // 1 + the rank that was lost first
};

struct alignas(64) GroupControl::Entry {
  WakeEvent bell;
  std::atomic<std::int32_t> process;
  std::atomic<Presence> presence;
  RobustLock lock;
  ErrorRecord error;  // valid once lost
  GatherSlot seat;
};

// Written in full before `Header::failed` names it, so that a reporter killed in between leaves nothing half
// said.
struct alignas(64) GroupControl::FailureSlot {
  std::atomic<std::uint32_t> claimed;  // two lanes of a rank may fail at once
  ErrorRecord error;
};

std::int64_t GroupControl::bytes(int ranks) {
  return static_cast<std::int64_t>(sizeof(Header) + ranks * sizeof(Entry) +
                                   (ranks + 1) * sizeof(FailureSlot));
}

GroupControl::Header& GroupControl::header() const {
  return *reinterpret_cast<Header*>(memory_.data());
}

GroupControl::Entry& GroupControl::entry(int rank) const {
  return reinterpret_cast<Entry*>(memory_.data() + sizeof(Header))[rank];
}

GroupControl::FailureSlot& GroupControl::failure_slot(int reporter) const {
  std::byte* slots = memory_.data() + sizeof(Header) + ranks_ * sizeof(Entry);
  return reinterpret_cast<FailureSlot*>(slots)[reporter];
}

WakeEvent& GroupControl::bell(int rank) const {
  return entry(rank).bell;
}

RobustLock& GroupControl::lock(int rank) const {
  return entry(rank).lock;
}

GatherSlot& GroupControl::seat(int rank) const {
  return entry(rank).seat;
}

void GroupControl::enter(int rank) {
  entry(rank).presence.store(Presence::present, std::memory_order_relaxed);
  entry(rank).process.store(getpid(), std::memory_order_release);
}

int GroupControl::process_of(int rank) const {
  return entry(rank).process.load(std::memory_order_acquire);
}

Presence GroupControl::presence_of(int rank) const {
  // Acquire: whoever sees that a rank has ended also sees every flag it stored before.
  return entry(rank).presence.load(std::memory_order_acquire);
}

void GroupControl::ring_all() noexcept {
  for (int rank = 0; rank < ranks_; ++rank) bell(rank).ring();
}

void GroupControl::leave(int rank) noexcept {
  entry(rank).presence.store(Presence::left, std::memory_order_seq_cst);
  ring_all();
}

void GroupControl::lose(int rank, const ErrorRecord& error, int reporter) noexcept {
  entry(rank).error = error;
  std::uint32_t nobody = 0;
  // Release: error_of() is read after first_lost().
  header().lost.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank + 1),
                                        std::memory_order_acq_rel);
  entry(rank).presence.store(Presence::lost, std::memory_order_seq_cst);

  WaitRecord record;
  record.rank = rank;
  record.peer = rank;
  // The launcher's text already says who was lost and how.
  const std::string reason = reporter == launcher() ? "" : str("rank ", rank, " ended by an error: ");
  fail(reporter, failure_record(ErrorRecord::Kind::peer_lost, record, reason + error.text));
}

int GroupControl::first_lost() const {
  return static_cast<int>(header().lost.load(std::memory_order_acquire)) - 1;
}

const ErrorRecord& GroupControl::error_of(int lost_rank) const {
  return entry(lost_rank).error;
}

// Sequentially consistent for the sake of WakeEvent.
bool GroupControl::failed() const {
  return header().failed.load(std::memory_order_seq_cst) != 0;
}

void GroupControl::fail(int reporter, const ErrorRecord& error) noexcept {
  if (failed()) return;
  FailureSlot& slot = failure_slot(reporter);
  if (slot.claimed.exchange(1, std::memory_order_acq_rel) != 0) {
    while (!failed()) sched_yield();  // the rank's other thread is about to publish
    return;
  }
  slot.error = error;
  std::uint32_t none = 0;
  header().failed.compare_exchange_strong(none, static_cast<std::uint32_t>(reporter + 1),
                                          std::memory_order_seq_cst);
  ring_all();
}

const ErrorRecord& GroupControl::failure() const {
  return failure_slot(static_cast<int>(header().failed.load(std::memory_order_acquire)) - 1).error;
}

void GroupControl::throw_failure(WaitRecord asking) const {
  ErrorRecord error = failure();
  const bool own = error.wait.rank == asking.rank;
  asking.peer = error.wait.peer;
  const std::string prefix =
      own ? "" : str("rank ", asking.rank, " ends ", to_string(asking.operation), " ", asking.call, ": ");
  if (!own) error.wait = asking;
  error.raise(prefix);
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
