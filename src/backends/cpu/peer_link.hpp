// What a lane of a host backend needs of its peers: call numbers, call summaries, and memory for messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/error.hpp"
#include "group/channel.hpp"

namespace ferry::cpu {

// Which of a link's areas messages go through. Shared memory has one for each; an engine needs only one.
enum class Staging { dispatch, combine };

// One call is
//
//   begin(...)                     takes the lane's next call number
//   reserve(...)                   of calls that carry messages, not of those that carry summaries alone
//   summary_to(p), outgoing(p)     written by the caller, for every peer
//   post(...)                      hands them to the link
//   wait()                         then summary_from(p) and incoming(p) may be read until the next begin()
//
// An exception from begin() or wait() ends the call on this rank; the next begin() starts the next call. The
// errors are those of Channel.
//
// One thread at a time. The phases may run in different threads if the caller orders them.
class PeerLink {
 public:
  virtual ~PeerLink() = default;

  virtual std::uint64_t begin(Operation operation, std::span<const CallOption> options) = 0;
  virtual std::uint64_t call() const = 0;

  virtual std::byte* summary_to(int peer) = 0;
  virtual const std::byte* summary_from(int peer) const = 0;

  // false: messages are written where the peer reads them, and their places follow from the plan alone.
  // true: the messages of a pair travel as one block, so they are packed, and both ends know their order.
  virtual bool packs() const = 0;

  // Makes room for `bytes[p]` bytes of messages to each rank p. The entry of this rank is what it stages for
  // itself. Links that do not pack ignore it.
  virtual void reserve(std::span<const std::int64_t> bytes) = 0;

  // The first message to or from a rank; this rank reads what it stages for itself.
  virtual std::byte* outgoing(Staging staging, int peer) = 0;
  virtual const std::byte* incoming(Staging staging, int peer) const = 0;

  // Bytes of messages that `peer` has sent in this call. Links that pack only.
  virtual std::int64_t incoming_bytes(int peer) const = 0;

  // Publishes the call to every rank. `split`: the caller goes on, and calls wait() in the receive phase.
  virtual void post(bool split) = 0;
  // Blocks until every rank has posted the call.
  virtual void wait() = 0;

  // Later chunks of a call's messages, numbered from 1. Links that do not pack only.
  virtual void post_chunk(std::int64_t chunk) = 0;
  virtual void wait_chunk(int peer, std::int64_t chunk) = 0;

  // As Channel::refuse.
  virtual void refuse(Operation operation, const Error& error) noexcept = 0;
};

}  // namespace ferry::cpu
