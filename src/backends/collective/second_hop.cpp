#include "backends/collective/second_hop.hpp"

#include <algorithm>

#include "backends/collective/message_rounds.hpp"
#include "base/text.hpp"

namespace ferry::collective {

std::vector<FollowingMessages> exchange_second_headers(PairBlocks<SecondHopHeader>& headers,
                                                       const SecondHop& hop,
                                                       const MessageCarrier::Wire& wire) {
  const int ranks = static_cast<int>(hop.bytes.size());
  const auto bytes_to = [&](int peer) { return hop.bytes[static_cast<std::size_t>(peer)]; };
  std::int64_t most = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer != hop.me) most = std::max(most, bytes_to(peer));
  }
  std::vector<std::int64_t> sent_bytes, sent_offsets, received_bytes, received_offsets;
  for (int peer = 0; peer < ranks; ++peer) {
    headers.header_to(peer) = {.call = hop.call,
                               .seal = 0,
                               .messages = following_of(bytes_to(peer), most, hop.message_bytes, hop.window)};
    headers.seal(hop.me, peer);
    headers.forget(peer);
    sent_bytes.push_back(peer == hop.me ? 0 : headers.sent_bytes(peer));
    sent_offsets.push_back(headers.sent_offset(peer));
    received_bytes.push_back(peer == hop.me ? 0 : headers.received_bytes(peer));
    received_offsets.push_back(headers.received_offset(peer));
  }
  wire.transfer({.send = headers.sent(),
                 .send_bytes = sent_bytes,
                 .send_offsets = sent_offsets,
                 .receive = headers.received(),
                 .receive_bytes = received_bytes,
                 .receive_offsets = received_offsets});
  std::vector<FollowingMessages> following;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == hop.me) {
      following.push_back(headers.header_to(peer).messages);
      continue;
    }
    if (!headers.is_sealed(hop.me, peer)) {
      wire.fail(transfer_fault(peer, headers.arrived_whole(peer),
                               str("its block of ", headers.received_bytes(peer),
                                   " bytes, which holds the counts of the second hop")));
    }
    following.push_back(headers.header_from(peer).messages);
    if (const std::string fault = fault_of(following.back(), peer); !fault.empty()) wire.fail(fault);
  }
  return following;
}

}  // namespace ferry::collective
