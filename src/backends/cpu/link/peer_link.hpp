// A lane's link to its peers in a host backend: call numbers, call summaries, memory for messages, and a
// relay's work on messages between the hops of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "exchange/lane_counts.hpp"
#include "ferry/error.hpp"
#include "group/channel.hpp"

namespace ferry::cpu {

// Messages between two ranks that a relay holds. They are on their way from `origin` to `final`.
struct HeldMessages {
  int origin, final;
  const std::byte* data;
  std::int64_t bytes;
  // What the origin has sent for all ranks behind the relay, after the messages for each of them.
  std::span<const std::byte> shared = {};
};

// Messages that a relay sends on, to `final`, which receives them as messages from `origin`.
struct ForwardedMessages {
  int origin, final;
  std::int64_t bytes;
  std::int64_t messages;
  std::byte* out = nullptr;  // where write() writes them
};

// Implements a relay's work for an operation. A link calls it, maybe in a thread of its own, between post()
// and the end of wait().
class Forwarder {
 public:
  virtual ~Forwarder() = default;

  // Decides which of the `held` messages to forward: those that have come here for ranks of other nodes, or
  // from there. Messages to this rank from other nodes are included; they go to this rank itself.
  virtual std::vector<ForwardedMessages> plan(std::span<const HeldMessages> held) = 0;
  // Writes the messages that plan() has returned, ordered by `final`, then by `origin`. May make those that
  // are the only ones for their `final` fewer.
  virtual void write(std::span<ForwardedMessages> forwards) = 0;
};

// Staging area of a message. Shared memory has one for each; an engine needs only one.
enum class Staging { dispatch, combine };

// Which way the messages of a call go: to the ranks of the experts, or from there to the source ranks. It
// decides which rank is the relay between two nodes; see Topology::relay_of.
enum class Direction { to_experts, to_sources };

// The messages of a call, described to a link that packs.
struct Reservation {
  Direction direction;
  std::int64_t message_bytes;  // of one message, 1 or more
  // Bytes to each rank [R]; own entry: staged locally.
  std::span<const std::int64_t> bytes;
  // Two hops: null if relays pass the messages of each pair on unchanged. Must live until wait() has
  // returned.
  Forwarder* forwarder = nullptr;
};

// One call is
//
//   begin(...)                     takes the lane's next call number
//   reserve(...)                   only if the call has messages
//   summary_to(p), outgoing(p)     written by the caller, for every peer
//   post(...)                      hands them to the link
//   wait()                         then summary_from(p) and incoming(p) may be read until the next begin()
//
// If it was begun with `goes_on`, all but begin() follows once more, after go_on(), with further summaries
// and messages.
//
// An exception from begin() or wait() ends the call on this rank; the next begin() starts the next call. The
// errors are those of Channel.
//
// One thread at a time. The phases may run in different threads if the caller orders them.
class PeerLink {
 public:
  virtual ~PeerLink() = default;

  virtual std::uint64_t begin(Operation operation, std::span<const ComparedOption> options,
                              bool goes_on = false) = 0;
  virtual void go_on() = 0;
  virtual std::uint64_t call() const = 0;

  virtual std::byte* summary_to(int peer) = 0;
  virtual const std::byte* summary_from(int peer) const = 0;

  // false: messages are written where the peer reads them, and their places follow from the plan alone.
  // true: the messages of a pair travel as one block, so they are packed, and both ends know their order.
  virtual bool packs() const = 0;

  // Makes room for messages to each rank. Links that do not pack ignore it.
  virtual void reserve(const Reservation& messages) = 0;

  // Whether messages reach ranks of other nodes in two hops.
  virtual bool has_relays() const { return false; }

  // The first message to or from a rank; this rank reads what it stages for itself.
  virtual std::byte* outgoing(Staging staging, int peer) = 0;
  virtual const std::byte* incoming(Staging staging, int peer) const = 0;

  // Links that pack only: bytes of messages that `peer` has sent in this call; and what this rank has sent or
  // forwarded, to ranks of its node and to others. After wait().
  virtual std::int64_t incoming_bytes(int peer) const = 0;
  virtual Traffic sent_within_node() const { return {}; }
  virtual Traffic sent_between_nodes() const { return {}; }

  // Publishes the call to every rank. `split`: the caller goes on, and calls wait() in the receive phase.
  virtual void post(bool split) = 0;
  // Blocks until every rank has posted the call.
  virtual void wait() = 0;

  // Later chunks of a call's messages, numbered from 1. Links that do not pack only.
  virtual void post_chunk(std::int64_t chunk) = 0;
  virtual void wait_chunk(int peer, std::int64_t chunk) = 0;

  // As Channel::refuse.
  virtual void refuse(Operation operation, const Error& error) noexcept = 0;

  virtual const LaneWaits& waits() const = 0;

  // Waits until no thread of the link uses the forwarder or the memory of a call any more. No call follows.
  virtual void end() noexcept {}
};

}  // namespace ferry::cpu
