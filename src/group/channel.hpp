// One lane's signals on one rank: call numbers, flags, notes, refusals.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "group/error_record.hpp"

namespace ferry {

class SymmetricMemory;

// An argument of a call that every rank must pass alike. The name has static storage. Ranks compare values by
// position, so an operation always lists its options in the same order.
struct CallOption {
  const char* name;
  std::int64_t value;
};

inline constexpr int kMaxCallOptions = 22;

// Every call of a lane, whatever its operation, takes the next call number on every rank. One call is
//
//   begin(...)                    the number; from here to post() this rank writes to its peers
//   note_to(p), rows, ...         written by the caller, in generation() of the staging
//   post(p) for every peer        makes them visible to p
//   wait(p) for every peer        then note_from(p), rows, ... of generation() may be read until the next
//   begin()
//
// Rows may follow in chunks, numbered from 1, while the call lasts: post_chunk(p, c) and wait_chunk(p, c).
//
// An exception of begin() or wait() ends the call on this rank; the next begin() starts the next call. One
// thread at a time uses a channel; the send half and the receive half may be different threads that the
// caller orders.
//
// Why two generations suffice. Rank p overwrites what it wrote to r in call n when it sends call n+2.
// begin(n+2) returns only after r's flag of call n+1 has been seen, and r posts n+1 only after it has ended
// call n, that is, after its last read of what p wrote in n. A call that ended well has seen that flag
// already, so begin() finds it without waiting; one that ended early (a refusal, options that differ) waits
// for it in begin(). The same holds for the flags and refusals themselves: they lie by generation, so those
// of n+1 never hide those of n.
class Channel {
 public:
  // Symmetric bytes a channel takes on every rank; a multiple of 64.
  static std::int64_t bytes(int ranks, std::int64_t note_bytes);

  // Local. `offset` is a multiple of 64 and the same on every rank; the memory there is zero, as it comes.
  // `memory` outlives the channel. Waits last `deadline` seconds at most.
  Channel(Rank rank, const SymmetricMemory& memory, std::int64_t offset, std::int64_t note_bytes,
          double deadline);

  // Starts the lane's next call and returns its number (the first is 1). Throws the group's failure. Waits
  // for peers only if this rank's previous call ended early.
  std::uint64_t begin(Operation operation, std::span<const CallOption> options);

  std::uint64_t call() const { return call_; }
  int parity() const { return static_cast<int>(call_ & 1); }

  // The note of the current call: note_bytes, aligned to 64. To be written before post(peer), read after
  // wait(peer).
  std::byte* note_to(int peer) const;
  const std::byte* note_from(int peer) const;

  // Makes everything this thread has written visible to `peer` (release) and wakes it. Streaming stores need
  // a fence of their own before it. Posting to oneself is allowed.
  void post(int peer);

  // Blocks until `peer` has posted this call (acquire). Throws the peer's error if it refused the call, also
  // that of another peer if this one is not here yet; UsageError if operation or options differ, on both
  // sides; TimeoutError or PeerLostError, final for the group.
  void wait(int peer);

  // Makes everything written so far visible to `peer` (release), as chunk 1, 2, ... of the call it has been
  // posted.
  void post_chunk(int peer, std::int64_t chunk);

  // Blocks until `peer`, whose call has been waited for, has posted this chunk (acquire). TimeoutError and
  // PeerLostError as in wait(); their record tells chunks, not calls.
  void wait_chunk(int peer, std::int64_t chunk);

  // This rank's own call is bad: ends it for all peers that have not been posted to, with the same error.
  // Without a begin() before it, it takes the next call number. May wait as begin() does; a failure of the
  // group is left to the next begin().
  void refuse(Operation operation, const Error& error) noexcept;

 private:
  struct Letter;  // what one rank posts to another in one call
  struct Own;     // what all peers share on one rank

  Letter& letter(int at, int from, std::uint64_t call) const;
  Own& own(int at) const;
  std::byte* note(int at, int from) const;
  void take_number(Operation operation, std::span<const CallOption> options);
  void await_previous();
  void await(int peer, const std::atomic<std::uint64_t>* instead);
  bool all_posted() const;
  void post_refusal(int peer, const ErrorRecord& refusal);
  void finish_post(int peer);
  [[noreturn]] void raise_refusal(int peer, const Letter& in) const;
  void raise_any_refusal() const;
  void compare(int peer, const Letter& in) const;

  Rank rank_;
  const SymmetricMemory* memory_;
  std::int64_t offset_;
  std::int64_t note_bytes_;
  double deadline_;
  int index_;
  int ranks_;

  std::uint64_t call_ = 0;
  Operation operation_ = Operation::none;
  std::array<CallOption, kMaxCallOptions> options_{};
  int option_count_ = 0;
  std::vector<std::uint64_t> posted_;  // [ranks] last call posted to each
};

}  // namespace ferry
