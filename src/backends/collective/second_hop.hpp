// What ranks tell one another before the second hop: the messages that follow.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/collective/message_carrier.hpp"
#include "backends/collective/pair_blocks.hpp"

namespace ferry::collective {

// What a rank sends in the second hop.
struct SecondHop {
  std::uint64_t call;
  int me;
  const std::vector<std::int64_t>& bytes;  // [R] to each rank
  std::int64_t message_bytes;
  int window;  // Config::window
};

// Collective. The content of the headers to all ranks has been written. Returns what follows from every rank;
// the entry of this rank is what it says itself. The content from the others is then in `headers`.
std::vector<FollowingMessages> exchange_second_headers(PairBlocks<SecondHopHeader>& headers,
                                                       const SecondHop& hop,
                                                       const MessageCarrier::Wire& wire);

}  // namespace ferry::collective
