#include "backends/collective/device_messages.hpp"

#include <algorithm>
#include <utility>

#include "backends/collective/message_rounds.hpp"

namespace ferry::collective {

void DeviceMessages::clear() {
  has_messages_ = false;
  within_node_ = between_nodes_ = {};
}

void DeviceMessages::reserve(Outgoing messages) {
  has_messages_ = true;
  sent_ = std::move(messages);
}

// Counts what this rank sends to `to`.
void DeviceMessages::count(int to, std::int64_t messages, std::int64_t bytes) {
  Traffic& traffic = same_node(me_, to) ? within_node_ : between_nodes_;
  traffic.messages += messages;
  traffic.bytes += bytes;
}

FollowingMessages DeviceMessages::announce(int peer, std::int64_t*) const {
  if (!has_messages_) return {};
  std::int64_t most = 0;
  for (std::size_t rank = 0; rank < sent_.bytes.size(); ++rank) {
    if (static_cast<int>(rank) != me_) most = std::max(most, sent_.bytes[rank]);
  }
  return following_of(sent_.bytes[static_cast<std::size_t>(peer)], most, sent_.message_bytes, window_);
}

void DeviceMessages::exchange(std::uint64_t, const std::function<FollowingMessages(int peer)>& following,
                              const std::function<const std::int64_t*(int peer)>&, const Wire& wire) {
  if (sent_.agreed) sent_.agreed();
  const std::size_t ranks = sent_.bytes.size();
  std::vector<FollowingMessages> all;
  std::vector<std::int64_t> received_at(ranks, 0);
  received_.assign(ranks, 0);
  std::int64_t end = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const int peer = static_cast<int>(rank);
    all.push_back(following(peer));
    received_at[rank] = sent_.slot_bytes > 0 ? peer * sent_.slot_bytes : end;
    if (peer == me_) continue;
    received_[rank] = all.back().bytes;
    end += received_[rank];
    if (sent_.slot_bytes > 0 && received_[rank] > sent_.slot_bytes) wire.fail(counts_fault(peer));
    count(peer, sent_.bytes[rank] / sent_.message_bytes, sent_.bytes[rank]);
  }
  if (sent_.slot_bytes == 0) sent_.receive = sent_.room_for(end);
  transfer_in_rounds({.send = sent_.send,
                      .send_bytes = sent_.bytes,
                      .send_offsets = sent_.offsets,
                      .receive = sent_.receive,
                      .receive_bytes = received_,
                      .receive_offsets = received_at,
                      .device = true},
                     me_, all, wire.transfer);
  incoming_.clear();
  for (const std::int64_t at : received_at) incoming_.push_back(sent_.receive + at);
}

}  // namespace ferry::collective
