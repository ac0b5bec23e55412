// What carries the messages of a call once all ranks have agreed to it: between host memory straight or over
// relays (message_hops.hpp), or between device memory (device_messages.hpp).
#pragma once

#include <cstdint>
#include <functional>

#include "backends/collective/pair_blocks.hpp"
#include "engine/engine.hpp"

namespace ferry::collective {

class MessageCarrier {
 public:
  // What a carrier needs of the call.
  struct Wire {
    std::function<void(const AllToAllV&)> transfer;  // throws if the engine fails
    std::function<void(int peer)> fail;              // throws: bytes of the peer are missing
  };

  virtual ~MessageCarrier() = default;

  // Starts a call that carries no messages until they are reserved.
  virtual void clear() = 0;
  virtual bool has_messages() const = 0;
  // During exchange(): whether this rank waits for what relays forward.
  virtual bool awaits_relays() const { return false; }
  // What this rank's block for `peer` says of the messages. A carrier may have a table of table_bytes() at
  // the end of each block; otherwise `table` is null.
  virtual std::int64_t table_bytes() const { return 0; }
  virtual FollowingMessages announce(int peer, std::int64_t* table) const = 0;
  // Collective. `following(p)` and `table(p)` are what the block of rank p said.
  virtual void exchange(std::uint64_t call, const std::function<FollowingMessages(int peer)>& following,
                        const std::function<const std::int64_t*(int peer)>& table, const Wire& wire) = 0;
};

}  // namespace ferry::collective
