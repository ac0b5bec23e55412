// Interface of what carries the messages of a call once all ranks have agreed to it: between host memory
// directly or over relays (message_hops.hpp), or between device memory (device_messages.hpp).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "backends/collective/hop_tables.hpp"
#include "backends/collective/pair_blocks.hpp"
#include "engine/engine.hpp"

namespace ferry::collective {

class MessageCarrier {
 public:
  // What a carrier needs of the call.
  struct Wire {
    std::function<void(const AllToAllV&)> transfer;  // throws if the engine fails
    // Throws: what is wrong with what has arrived.
    std::function<void(const std::string& fault)> fail;
  };

  virtual ~MessageCarrier() = default;

  // Starts a call that carries no messages until they are reserved.
  virtual void clear() = 0;
  virtual bool has_messages() const = 0;
  // A block may end with a table for the carrier. Bytes of the tables; the same in all calls.
  virtual TableBytes tables() const { return {}; }
  // What this rank's block announces to `peer` about the messages. `table`: of that block; null without
  // tables.
  virtual FollowingMessages announce(int peer, std::int64_t* table) const = 0;
  // Collective. `following(p)` and `table(p)` are what the block of rank p announced.
  virtual void exchange(std::uint64_t call, const std::function<FollowingMessages(int peer)>& following,
                        const std::function<const std::int64_t*(int peer)>& table, const Wire& wire) = 0;

  // For the errors of a wait during exchange(), in the thread that runs it.
  // True while this rank waits for forwarded messages.
  virtual bool in_second_hop() const { return false; }
  // The relay that passes on what `peer` sends to this rank; -1: none.
  virtual int relay_from(int) const { return -1; }
  // True if `peer` forwards messages of other ranks to this rank.
  virtual bool is_relay(int) const { return false; }
  // The role of this rank that a wait for data of `peer` names in the current transfer; with one hop none.
  virtual WaitRole role(int /*peer*/) const { return WaitRole::none; }
  // False if data of `peer` is known to be missing in the current transfer.
  virtual bool has_arrived(int) const { return true; }
};

}  // namespace ferry::collective
