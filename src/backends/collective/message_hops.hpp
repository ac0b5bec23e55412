// Carries the messages of a call over an engine, in memory of the host or of a device: straight to their
// ranks, or in two hops.
//
// One hop: one all_to_all_v. Two hops: messages to ranks of the own node go straight there in the first hop.
// Between nodes a relay lies on the way (Topology::relay_of):
//
//   to the experts:  source --first hop, between nodes--> relay --second hop, within the node--> rank
//   to the sources:  rank --first hop, within the node--> relay --second hop, between nodes--> source
//
// Each hop is an all_to_all_v of the whole group, in which most pairs have no bytes, in one or more rounds.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backends/collective/pair_blocks.hpp"
#include "backends/cpu/link/peer_link.hpp"
#include "base/mapping.hpp"
#include "engine/engine.hpp"
#include "exchange/lane_counts.hpp"
#include "ferry/error.hpp"
#include "ferry/topology.hpp"

namespace ferry::collective {

class HopMemory {
 public:
  // What a rank sends and receives in each hop.
  enum class Part { first_outbox, first_inbox, second_outbox, second_inbox };

  virtual ~HopMemory() = default;
  virtual bool on_device() const = 0;
  // Makes sure that a part has at least `bytes`. A part grows only for data of damaged plans, and loses its
  // contents then.
  virtual std::byte* room(Part part, std::int64_t bytes) = 0;
  // Copies between parts. The copy is done when finish() has returned.
  virtual void copy(std::byte* to, const std::byte* from, std::int64_t bytes) = 0;
  virtual void finish() = 0;
};

class HostHopMemory final : public HopMemory {
 public:
  // Bytes of each part, in the order of Part.
  explicit HostHopMemory(const std::array<std::int64_t, 4>& bytes) {
    for (std::size_t part = 0; part < parts_.size(); ++part) parts_[part] = LocalMemory(bytes[part]);
  }

  bool on_device() const override { return false; }
  std::byte* room(Part part, std::int64_t bytes) override {
    LocalMemory& memory = parts_[static_cast<std::size_t>(part)];
    if (memory.bytes() < bytes) memory = LocalMemory(bytes);
    return memory.data();
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void finish() override {}

 private:
  std::array<LocalMemory, 4> parts_;
};

// The blocks of HopBlocks begin at a multiple of it, in bytes.
inline constexpr std::int64_t kPairAlign = 64;

// What a rank sends or receives in a hop: a block for each rank.
struct HopBlocks {
  std::byte* base = nullptr;
  std::vector<std::int64_t> bytes, offsets;  // [R]

  explicit HopBlocks(int ranks)
      : bytes(static_cast<std::size_t>(ranks), 0), offsets(static_cast<std::size_t>(ranks), 0) {}
  std::byte* block(int rank) const { return base + offsets[static_cast<std::size_t>(rank)]; }
  // Places the blocks one after another in a part of the memory.
  void place(HopMemory& memory, HopMemory::Part part) {
    std::int64_t end = 0;
    for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
      offsets[rank] = end;
      end += (bytes[rank] + kPairAlign - 1) / kPairAlign * kPairAlign;
    }
    base = memory.room(part, end);
  }
};

// Bytes of the table in the block to each rank and from each rank. [R], or empty: no tables.
struct TableBytes {
  std::vector<std::int64_t> sent, received;

  std::int64_t sent_to(int peer) const { return sent.empty() ? 0 : sent[static_cast<std::size_t>(peer)]; }
  std::int64_t received_from(int peer) const {
    return received.empty() ? 0 : received[static_cast<std::size_t>(peer)];
  }
};

// Where messages from rank `from` to rank `to` go in the first hop: to their relay, or straight there.
int first_stop(const Topology& topology, cpu::Direction direction, int from, int to);
// The relay that passes on what rank `from` sends to rank `to`; -1 if it goes there straight.
int relay_between(const Topology& topology, cpu::Direction direction, int from, int to);
// True if rank `relay` forwards messages of other ranks to rank `to`.
bool is_relay(const Topology& topology, cpu::Direction direction, int relay, int to);
// The role of rank `me`, in a transfer of messages in two hops, that a wait for `peer` names (-1: not known).
WaitRole role_towards(const Topology& topology, cpu::Direction direction, bool in_second_hop, int peer,
                      int me);

// Which messages share a block in two hops: the tables in the blocks of a call have an entry, a number of
// bytes, for each of them. Sender and receiver know from the topology which ranks the entries of a block
// stand for, so a rank's tables have at most 2 R entries in each direction.
class HopTables {
 public:
  // The tables of `rank`.
  HopTables(const Topology& topology, int rank);

  // In the first hop: the ranks that the messages in the block from `from` to `to` are for, ascending. One of
  // the two is this rank.
  std::span<const int> receivers(cpu::Direction direction, int from, int to) const;
  // In the second hop: the ranks that the messages in the block from `relay` to `to` are from, ascending.
  std::span<const int> origins(cpu::Direction direction, int relay, int to) const;

  // Enough for either direction.
  TableBytes first_hop() const { return {bytes_to_, bytes_from_}; }
  TableBytes second_hop() const { return {bytes_from_, bytes_to_}; }

 private:
  std::span<const int> behind(int rank) const;
  std::span<const int> ranks_behind_relay(int source, int relay) const;

  const Topology topology_;
  const int me_, node_;
  // By local rank: a rank of this node, and the ranks of other nodes whose relay it is.
  std::vector<std::vector<int>> behind_;
  std::vector<std::int64_t> bytes_to_, bytes_from_;  // [R] of the first hop
};

// How messages travel: the same for all calls of an exchange.
struct HopOptions {
  bool relays;  // two hops, and several nodes
  int window;   // Config::window
};

// What a rank sends in a call.
struct SentMessages {
  cpu::Direction direction = cpu::Direction::to_experts;
  std::int64_t message_bytes = 1;
  // To each rank [R]: bytes of the messages, and where they are stored.
  std::vector<std::int64_t> bytes;
  std::vector<const std::byte*> stored;
  // In the first hop, or the only one: what goes to each rank, and the number of messages in it [R]. The
  // block to a relay holds the messages for each rank behind it, `bytes` of each, and then what they share.
  HopBlocks first;
  std::vector<std::int64_t> messages;
  bool shares = false;
  bool straight = false;                // one hop, although this exchange has relays
  cpu::Forwarder* forwarder = nullptr;  // as of Reservation
  // Where the messages of rank p must arrive: at `slots + p * slot_bytes`. Null: anywhere.
  std::byte* slots = nullptr;
  std::int64_t slot_bytes = 0;
  std::function<void()> agreed = nullptr;  // called before the transfers, when the ranks have agreed

  // Messages in one block for each rank, to be sent straight there.
  SentMessages(int ranks, std::int64_t bytes_of_message);
};

class MessageHops {
 public:
  MessageHops(const Topology& topology, int rank, const HopOptions& options,
              std::unique_ptr<HopMemory> memory);

  // Starts a call, which carries no messages until they are reserved.
  void clear();
  void reserve(SentMessages messages);
  // Makes room for messages in memory of the host. outgoing(): where the caller writes those to a rank.
  void reserve(const cpu::Reservation& messages);
  std::byte* outgoing(int rank) const { return const_cast<std::byte*>(sent_.stored[at(rank)]); }
  bool has_messages() const { return has_messages_; }

  // A block of the call may end with a table: bytes for each rank behind the block's receiver. Bytes of the
  // tables; the same in all calls.
  TableBytes tables() const { return relays_ ? tables_.first_hop() : TableBytes(); }
  // Bytes of the headers before the second hop.
  static std::int64_t second_headers_bytes(const TableBytes& tables);
  // What this rank's block announces to `peer` about the messages. `table`: of that block; null without
  // tables.
  FollowingMessages announce(int peer, std::int64_t* table) const;
  // Collective. `following(p)` and `table(p)` are what the block of rank p announced. `transfer` throws if
  // the engine fails. Throws UsageError for what is wrong with what has arrived.
  void exchange(std::uint64_t call, const std::function<FollowingMessages(int peer)>& following,
                const std::function<const std::int64_t*(int peer)>& table,
                const std::function<void(const AllToAllV&)>& transfer);

  // For the errors of a wait during exchange(), in the thread that runs it.
  // True while this rank waits for forwarded messages.
  bool in_second_hop() const { return in_second_hop_; }
  // The relay that passes on what `peer` sends to this rank; -1: none.
  int relay_from(int peer) const { return relay_between(topology_, sent_.direction, peer, me_); }
  // True if `peer` forwards messages of other ranks to this rank.
  bool is_relay(int peer) const { return collective::is_relay(topology_, sent_.direction, peer, me_); }
  // The role of this rank that a wait for data of `peer` names in the current transfer; with one hop none.
  WaitRole role(int peer) const {
    return straight() ? WaitRole::none : role_towards(topology_, sent_.direction, in_second_hop_, peer, me_);
  }
  // False if data of `peer` is known to be missing in the current transfer.
  bool has_arrived(int peer) const;

  // The messages from a rank, after exchange().
  const std::byte* incoming(int rank) const { return delivered_[at(rank)].data; }
  std::int64_t incoming_bytes(int rank) const { return delivered_[at(rank)].bytes; }
  // Traffic of this rank in this call.
  const Traffic& within_node() const { return within_node_; }
  const Traffic& between_nodes() const { return between_nodes_; }

 private:
  using Following = std::vector<FollowingMessages>;  // [R] of what every rank has announced
  using Tables = std::function<const std::int64_t*(int peer)>;
  using Transfer = std::function<void(const AllToAllV&)>;

  struct Delivered {
    const std::byte* data = nullptr;
    std::int64_t bytes = 0;
  };
  // In the current round: where the last eight bytes of a rank arrive, and the mark there until then.
  struct Awaited {
    const std::byte* last = nullptr;  // null: none
    std::uint64_t mark = 0;
  };

  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  bool straight() const { return !relays_ || sent_.straight; }
  bool same_node(int a, int b) const { return topology_.node_of(a) == topology_.node_of(b); }
  void count(int to, std::int64_t messages, std::int64_t bytes);
  FollowingMessages following_of(const HopBlocks& sent, int peer) const;
  std::byte* slot_of(int origin, std::int64_t bytes) const;
  void deliver(int origin, const std::byte* data, std::int64_t bytes);
  HopBlocks place_first(const Following& first);
  void transfer_in_rounds(const HopBlocks& sent, const HopBlocks& received, const Following& following,
                          std::uint64_t call, const Transfer& transfer);
  void mark_absent(const AllToAllV& round, std::uint64_t call, std::int64_t number);
  std::vector<cpu::HeldMessages> hold(const HopBlocks& received, const Tables& table);
  HopBlocks forward(const std::vector<cpu::HeldMessages>& held, const Following& first);
  Following exchange_second_headers(std::uint64_t call, const HopBlocks& sent, const Transfer& transfer);
  void second_hop(std::uint64_t call, const HopBlocks& sent, const Transfer& transfer);

  const Topology topology_;
  const int me_, ranks_;
  const bool relays_;
  const int window_;
  const std::unique_ptr<HopMemory> memory_;
  const HopTables tables_;
  PairBlocks<SecondHopHeader> second_headers_;  // with a table: bytes from each rank before the relay

  // The current call.
  bool has_messages_ = false, in_second_hop_ = false;
  bool exchanging_headers_ = false;  // those of the second hop
  SentMessages sent_;
  std::vector<Delivered> delivered_;  // [R]
  std::vector<Awaited> awaited_;      // [R]
  Traffic within_node_, between_nodes_;
};

}  // namespace ferry::collective
