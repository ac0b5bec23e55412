// The headers that ranks exchange before the second hop. They announce its messages.
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

// Collective. The content of the headers to all ranks has been written. Returns what every rank has
// announced, this one included; the content from the others is then in `headers`.
std::vector<FollowingMessages> exchange_second_headers(PairBlocks<SecondHopHeader>& headers,
                                                       const SecondHop& hop,
                                                       const MessageCarrier::Wire& wire);

}  // namespace ferry::collective
