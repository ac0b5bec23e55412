// Carries the messages of a call over an engine: straight to their ranks, or in two hops.
//
// One hop: one all_to_all_v. Two hops: messages to ranks of the own node go straight there in the first hop.
// Between nodes a relay lies on the way (Topology::relay_of):
//
//   to the experts:  source --first hop, between nodes--> relay --second hop, within the node--> rank
//   to the sources:  rank --first hop, within the node--> relay --second hop, between nodes--> source
//
// Each hop is an all_to_all_v of the whole group, in which most pairs have no bytes, in one or more rounds.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "backends/collective/hop_tables.hpp"
#include "backends/collective/message_carrier.hpp"
#include "backends/cpu/link/peer_link.hpp"
#include "engine/engine.hpp"
#include "ferry/topology.hpp"
#include "memory/local_memory.hpp"

namespace ferry::collective {

// The messages for each rank begin at a multiple of it, in bytes.
inline constexpr std::int64_t kPairAlign = 64;

// Bytes of a lane's memory for messages. `second`: of the second hop; 0 with one hop.
struct MessageMemory {
  std::int64_t outbox, inbox;
  std::int64_t second_outbox = 0, second_inbox = 0;
};

// How messages travel: the same for all calls of an exchange.
struct HopOptions {
  bool relays;  // two hops, and several nodes
  int window;   // Config::window
};

class MessageHops final : public MessageCarrier {
 public:
  MessageHops(const Topology& topology, int rank, const HopOptions& options, const MessageMemory& bytes);

  void clear() override;
  void reserve(const cpu::Reservation& messages);
  bool has_messages() const override { return has_messages_; }
  // Where the messages to a rank are written.
  std::byte* outgoing(int rank) const;

  // With relays: the bytes that follow for each rank behind the receiver of a block.
  TableBytes tables() const override { return options_.relays ? tables_.first_hop() : TableBytes(); }
  // Bytes of the headers before the second hop.
  static std::int64_t second_headers_bytes(const TableBytes& tables);
  FollowingMessages announce(int peer, std::int64_t* table) const override;
  void exchange(std::uint64_t call, const std::function<FollowingMessages(int peer)>& following,
                const std::function<const std::int64_t*(int peer)>& table, const Wire& wire) override;
  bool in_second_hop() const override { return in_second_hop_; }
  int relay_from(int peer) const override { return relay_between(topology_, direction_, peer, me_); }
  bool is_relay(int peer) const override { return collective::is_relay(topology_, direction_, peer, me_); }
  WaitRole role(int peer) const override {
    if (!options_.relays) return WaitRole::none;
    return role_towards(topology_, direction_, in_second_hop_, peer, me_);
  }
  bool has_arrived(int peer) const override;

  // The messages from a rank, after exchange().
  const std::byte* incoming(int rank) const { return delivered_[static_cast<std::size_t>(rank)].data; }
  std::int64_t incoming_bytes(int rank) const { return delivered_[static_cast<std::size_t>(rank)].bytes; }
  // Traffic of this rank in this call.
  const Traffic& within_node() const { return within_node_; }
  const Traffic& between_nodes() const { return between_nodes_; }

 private:
  // Data that this rank sends, or receives, in a hop: a block for each rank.
  struct Blocks {
    LocalMemory memory;
    std::vector<std::int64_t> bytes, offsets;  // [R]

    std::byte* block(int rank) const { return memory.data() + offsets[static_cast<std::size_t>(rank)]; }
    // Places the blocks one after another and makes room for them.
    void place();
  };
  struct Delivered {
    const std::byte* data = nullptr;
    std::int64_t bytes = 0;
  };
  struct Forward {
    cpu::ForwardedMessages messages;
    const std::byte* data;  // null: the forwarder writes them
  };

  bool same_node(int a, int b) const { return topology_.node_of(a) == topology_.node_of(b); }
  int first_stop(int final) const;
  void count(int to, std::int64_t messages, std::int64_t bytes);
  void transfer(const Blocks& sent, const Blocks& received, const std::vector<FollowingMessages>& following,
                std::uint64_t call, const Wire& wire);
  std::vector<cpu::HeldMessages> hold(const std::function<const std::int64_t*(int peer)>& table,
                                      const Wire& wire);
  std::vector<Forward> plan_forwards(const std::vector<cpu::HeldMessages>& held,
                                     const std::vector<FollowingMessages>& following);
  void write_forwards(const std::vector<Forward>& forwards);
  void write_second_tables(const std::vector<Forward>& forwards) const;
  void exchange_second(std::uint64_t call, const std::vector<Forward>& forwards, const Wire& wire);

  const Topology topology_;
  const int me_, ranks_;
  const HopOptions options_;
  Blocks outbox_, inbox_;                // of the first hop
  Blocks second_outbox_, second_inbox_;  // of the second
  const HopTables tables_;
  PairBlocks<SecondHopHeader> second_headers_;  // with a table: bytes from each rank before the relay

  // The current call.
  bool has_messages_ = false, in_second_hop_ = false;
  bool exchanging_headers_ = false;  // those of the second hop
  cpu::Direction direction_ = cpu::Direction::to_experts;
  cpu::Forwarder* forwarder_ = nullptr;
  std::int64_t message_bytes_ = 1;
  std::vector<std::int64_t> bytes_to_, offset_to_;  // [R] of the messages to each rank, in the outbox
  std::vector<Delivered> delivered_;                // [R]
  // [R] In the current round: where the last eight bytes of each rank arrive, and the mark there until then.
  struct Awaited {
    const std::byte* last = nullptr;  // null: none
    std::uint64_t mark = 0;
  };
  std::vector<Awaited> awaited_;
  Traffic within_node_, between_nodes_;
};

}  // namespace ferry::collective
