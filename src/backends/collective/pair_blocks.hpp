// The blocks of fixed size that every rank sends to every other one before messages: in each call its call
// header and summary, and before the second hop what follows in it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/error_record.hpp"
#include "group/call_agreement.hpp"
#include "memory/local_memory.hpp"

namespace ferry::collective {

// The messages that follow a block. A receiver gets `bytes` of them, in rounds of at most `round_bytes`; all
// ranks take part in as many rounds as the rank that needs most.
struct FollowingMessages {
  std::int64_t bytes;
  std::int64_t message_bytes;  // of one message
  std::int64_t round_bytes;
  std::int64_t rounds;
};

struct BlockHeader {
  std::uint64_t call;
  std::int32_t lane;         // of its exchange
  std::int32_t lane_number;  // RankState::number_lane()
  Operation operation;
  FollowingMessages messages;
  std::int32_t refused;  // 1: `refusal` holds the error
  std::int32_t option_count;
  std::array<std::int64_t, kMaxCallOptions> options;
  ErrorRecord refusal;
};

struct SecondHopHeader {
  std::uint64_t call;
  FollowingMessages messages;
};

// The blocks to and from all ranks. A block is a header, then `content_bytes` that the user of the block
// fills in, aligned to 64 bytes.
template <class Header>
class PairBlocks {
 public:
  static constexpr std::int64_t kHeaderBytes = (sizeof(Header) + 63) / 64 * 64;

  static constexpr std::int64_t block_bytes(std::int64_t content_bytes) {
    return kHeaderBytes + (content_bytes + 63) / 64 * 64;
  }
  static constexpr std::int64_t bytes(int ranks, std::int64_t content_bytes) {
    return 2 * ranks * block_bytes(content_bytes);
  }

  PairBlocks(int ranks, std::int64_t content_bytes)
      : ranks_(ranks), block_(block_bytes(content_bytes)), memory_(bytes(ranks, content_bytes)) {}

  std::int64_t block_bytes() const { return block_; }
  std::int64_t offset(int peer) const { return peer * block_; }
  std::byte* sent() const { return memory_.data(); }
  std::byte* received() const { return memory_.data() + ranks_ * block_; }

  Header& header_to(int peer) const { return *reinterpret_cast<Header*>(sent() + offset(peer)); }
  const Header& header_from(int peer) const {
    return *reinterpret_cast<const Header*>(received() + offset(peer));
  }
  // A received block has not arrived() from forget() until it is received: calls are numbered from 1.
  void forget(int peer) const { reinterpret_cast<Header*>(received() + offset(peer))->call = 0; }
  bool arrived(int peer) const { return header_from(peer).call != 0; }

  std::byte* content_to(int peer) const { return sent() + offset(peer) + kHeaderBytes; }
  const std::byte* content_from(int peer) const { return received() + offset(peer) + kHeaderBytes; }

 private:
  int ranks_;
  std::int64_t block_;
  LocalMemory memory_;
};

}  // namespace ferry::collective
