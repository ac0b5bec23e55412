// One lane's control messages between ranks: call numbers, call headers, call summaries, chunk flags,
// refusals.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/errors.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"
#include "group/agreement.hpp"
#include "group/lane_waits.hpp"
#include "group/waiter.hpp"

namespace ferry {

// Every call of a lane takes the next call number on every rank, whatever its operation. One call is
//
//   begin(...)                    takes the number; from here to post() this rank writes to its peers
//   summary_to(p), rows, ...      written by the caller, rows into the staging buffer of parity()
//   post(p) for every peer        publishes the call header, and with it everything written for p
//   wait(p) for every peer        then summary_from(p) and p's rows may be read until the next begin()
//
// Rows may follow in chunks, numbered from 1, while the call lasts: post_chunk(p, c) and wait_chunk(p, c).
//
// A call summary is a block of bytes that the backend defines: row counts, and which optional arguments this
// rank was given. The call header is the channel's own: the call number, the operation and the options, or a
// refusal.
//
// An exception from begin() or wait() ends the call on this rank; the next begin() starts the next call.
//
// A refusal wins over the departure of the rank that refused: a peer finishes the call before, and then gets
// the refusal from begin() or wait(), even if the departure has failed the group meanwhile. So do options
// that differ: a rank that finds them marks the call, and a peer that sees the mark reads the options of all
// ranks.
//
// Thread safety: one thread at a time. The send phase and the receive phase may run in different threads if
// the caller orders them.
//
// Why two buffers are enough. Calls alternate between two buffers, chosen by parity(), so call n+2 reuses the
// buffer of call n. Rank p may overwrite in call n+2 what it wrote to rank r in call n:
//
//   1. begin(n+2) on p returns only after p has seen r's header of call n+1.
//   2. r posts that header only after it has finished call n, and so after its last read of p's data from n.
//
// A call that succeeded has already seen the headers of all peers, so the next begin() does not wait. After a
// call that was aborted (a refusal, options that differ), begin() waits for them. The headers, summaries and
// refusals also exist once for each parity, so those of call n+1 never overwrite those of call n.
class Channel {
 public:
  // Bytes of symmetric memory that a channel occupies on every rank; a multiple of 64.
  static std::int64_t bytes(int ranks, std::int64_t summary_bytes);

  // Local. `sections` [ranks]: the channel's bytes() of memory on every rank, aligned to 64 and zero at
  // first; they must outlive the channel. The waits for all headers of a call, or for all chunks of one
  // number, fail after `deadline` seconds together. `counts_waits`: waits() counts them.
  Channel(Rank rank, std::vector<std::byte*> sections, std::int64_t summary_bytes, double deadline,
          bool counts_waits = false);

  // Starts the lane's next call and returns its number (the first is 1). Waits for peers only if this rank's
  // previous call was aborted. If the group has failed, throws the refusal of this call by the rank that was
  // lost, or else the failure.
  std::uint64_t begin(Operation operation, std::span<const ComparedOption> options);

  std::uint64_t call() const { return call_; }

  // Which of the two buffers the current call uses: the lowest bit of its number.
  int parity() const { return static_cast<int>(call_ & 1); }

  // The current call's summary for or from a peer: summary_bytes, aligned to 64. Write it before post(peer);
  // read it after wait(peer).
  std::byte* summary_to(int peer) const;
  const std::byte* summary_from(int peer) const;

  // Publishes everything this thread has written to `peer` (release) and wakes the peer. After streaming
  // stores, call stream_fence() first. A rank may post to itself.
  void post(int peer);

  // Blocks until `peer` has posted this call (acquire).
  // @throws UsageError   the peer's operation or options differ; the peer throws the same
  // @throws any Error    a refusal: that of `peer`, or of another peer while `peer` has not posted
  // @throws TimeoutError, PeerLostError   final for the group
  void wait(int peer);

  // Publishes everything written so far (release) as chunk 1, 2, ... of the current call. Call it after
  // post(peer).
  void post_chunk(int peer, std::int64_t chunk);

  // Blocks until `peer` has posted this chunk (acquire). Call it after wait(peer). Throws TimeoutError and
  // PeerLostError as wait() does; their WaitRecord counts chunks instead of calls.
  void wait_chunk(int peer, std::int64_t chunk);

  // Refuses this rank's own call: every peer that has not been posted to gets `error` instead of a call
  // header. Takes the next call number if no begin() did. May wait as begin() does. If the group has failed,
  // does nothing: the next begin() throws that failure.
  void refuse(Operation operation, const Error& error) noexcept;

  const LaneWaits& waits() const { return waits_; }

 private:
  struct CallHeader;  // written by one rank for one peer: a call, or its refusal
  struct LaneRecord;  // one on each rank: the last call number, and marks that any peer may set

  CallHeader& header(int at, int from, std::uint64_t call) const;
  LaneRecord& lane_record(int at) const;
  std::byte* summary(int at, int from) const;
  void assign_call_number(Operation operation, std::span<const ComparedOption> options);
  void wait_for_previous_call();
  void wait_for_header(int peer, const std::atomic<std::uint64_t>* alternative);
  void wait_within_limit(const WaitCondition& condition, const WaitRecord& record, std::uint64_t chunk);
  bool has_refused(int peer, std::uint64_t call) const;
  bool has_found_difference(int peer, std::uint64_t call) const;
  void require_same_call_as_all(int excused);
  bool posted_to_all() const;
  void post_refusal(int peer, const ErrorRecord& refusal);
  void wake_after_post(int peer);
  [[noreturn]] void throw_refusal_of(int peer) const;
  void throw_any_refusal() const;
  void require_same_call(int peer, const CallHeader& received) const;

  Rank rank_;
  std::vector<std::byte*> sections_;  // [ranks]
  std::int64_t summary_bytes_;
  double deadline_;
  int index_;
  int ranks_;

  std::uint64_t call_ = 0;
  Operation operation_ = Operation::none;
  std::array<ComparedOption, kMaxComparedOptions> options_{};
  int option_count_ = 0;
  std::vector<std::uint64_t> posted_;  // [ranks] number of the last call posted to each

  // Shared by the waits for one chunk of all peers (chunk 0: the headers); starts with the first that blocks.
  std::optional<WaitLimit> limit_;
  std::uint64_t limited_chunk_ = 0;

  LaneWaits waits_;
};

}  // namespace ferry
