// Carries the messages of a call between memory of the ranks' devices, straight to their ranks.
#pragma once

#include <vector>

#include "backends/collective/message_carrier.hpp"
#include "exchange/lane_counts.hpp"
#include "ferry/topology.hpp"

namespace ferry::collective {

class DeviceMessages : public MessageCarrier {
 public:
  // The messages of a call. Lists are [R], in bytes.
  struct Outgoing {
    std::int64_t message_bytes;
    const std::byte* send;
    std::vector<std::int64_t> bytes, offsets;
    // The messages of rank p are received at `receive + p * slot_bytes` and take at most slot_bytes. If
    // slot_bytes is 0, those of all ranks follow one another in memory that `room_for` returns for their
    // total.
    std::byte* receive;
    std::int64_t slot_bytes;
    std::function<std::byte*(std::int64_t bytes)> room_for;
    // Called before the transfer, when the ranks have agreed on the call. Null: nothing. Not by relays.
    std::function<void()> agreed = nullptr;
  };

  // `window`: Config::window.
  DeviceMessages(const Topology& topology, int rank, int window)
      : topology_(topology), me_(rank), window_(window) {}

  void clear() override;
  virtual void reserve(Outgoing messages);
  bool has_messages() const override { return has_messages_; }
  FollowingMessages announce(int peer, std::int64_t* table) const override;
  void exchange(std::uint64_t call, const std::function<FollowingMessages(int peer)>& following,
                const std::function<const std::int64_t*(int peer)>& table, const Wire& wire) override;

  // After exchange(): what has come from other ranks.
  const std::byte* incoming(int rank) const { return incoming_[static_cast<std::size_t>(rank)]; }
  std::int64_t incoming_bytes(int rank) const { return received_[static_cast<std::size_t>(rank)]; }
  // Traffic of this rank in this call.
  const Traffic& within_node() const { return within_node_; }
  const Traffic& between_nodes() const { return between_nodes_; }

 protected:
  bool same_node(int a, int b) const { return topology_.node_of(a) == topology_.node_of(b); }
  void count(int to, std::int64_t messages, std::int64_t bytes);

  const Topology topology_;
  const int me_, window_;

  // The current call.
  Outgoing sent_{};
  std::vector<std::int64_t> received_;      // [R] bytes
  std::vector<const std::byte*> incoming_;  // [R]

 private:
  bool has_messages_ = false;
  Traffic within_node_, between_nodes_;
};

}  // namespace ferry::collective
