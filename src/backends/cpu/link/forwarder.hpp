// A relay's work on messages between the hops of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

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

// Implements that work for an operation. A link calls it, maybe in a thread of its own, between post() and
// the end of wait().
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

}  // namespace ferry::cpu
