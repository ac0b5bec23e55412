// The blocks that every rank sends to every other one before messages: in each call its call header and
// summary, and before the second hop the header of that hop. Their sizes are the same in all calls of a lane.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/mapping.hpp"
#include "group/agreement.hpp"

namespace ferry::collective {

// The messages that follow a block. A receiver gets `bytes` of them, in rounds of at most `round_bytes`. All
// ranks take part in as many rounds as the busiest rank needs.
struct FollowingMessages {
  std::int64_t bytes;
  std::int64_t message_bytes;  // of one message
  std::int64_t round_bytes;
  std::int64_t rounds;
};

struct BlockHeader {
  std::uint64_t call;        // first: PairBlocks::arrived()
  std::uint64_t seal;        // PairBlocks::seal()
  std::int32_t lane;         // of its exchange
  std::int32_t lane_number;  // RankState::number_lane()
  Operation operation;
  std::uint32_t epoch;
  FollowingMessages messages;
  std::int32_t refused;  // 1: `refusal` holds the error
  std::int32_t option_count;
  std::array<std::int64_t, kMaxComparedOptions> options;
  ErrorRecord refusal;

  // Bytes that seal() covers.
  std::size_t sealed_bytes() const { return refused != 0 ? sizeof *this : offsetof(BlockHeader, refusal); }
};

struct SecondHopHeader {
  std::uint64_t call;  // first
  std::uint64_t seal;
  FollowingMessages messages;

  std::size_t sealed_bytes() const { return sizeof *this; }
};

// Reads eight bytes that the engine may be writing.
std::uint64_t peek(const std::byte* at);

// Seal of a header of `bytes`, a multiple of 8, whose second word is the seal itself.
std::uint64_t seal_of(const std::byte* header, std::size_t bytes, int from, int to);

// Seal of the content of a block, a multiple of 8 bytes. `header`: the seal of its header.
std::uint64_t seal_of_content(const std::byte* content, std::int64_t bytes, std::uint64_t header);

// What all_to_all_v has done wrong with `what`, which rank `peer` sends. `arrived`: bytes have come, but they
// are not those that were sealed.
std::string transfer_fault(int peer, bool arrived, const std::string& what);

// The counts that rank `peer` has announced do not fit together.
std::string counts_fault(int peer);

// What is wrong with the messages that rank `peer` announces; empty: a rank can send them.
std::string fault_of(const FollowingMessages& messages, int peer);

// The blocks to and from all ranks. A block is a header, then content that the user of the block fills in,
// aligned to 64 bytes, and at its end a word that tells whether all of it has arrived.
template <class Header>
class PairBlocks {
 public:
  static constexpr std::int64_t kHeaderBytes = (sizeof(Header) + 63) / 64 * 64;
  static constexpr std::int64_t kLastBytes = sizeof(std::uint64_t);
  static constexpr std::int64_t kSmallestBlock = kHeaderBytes + kLastBytes;  // without content

  // Bytes of the contents to and from each rank.
  PairBlocks(std::span<const std::int64_t> sent, std::span<const std::int64_t> received)
      : sent_offsets_(offsets_of(sent)),
        received_offsets_(offsets_of(received)),
        memory_(sent_offsets_.back() + received_offsets_.back()) {}
  // Bytes of memory for the blocks.
  static std::int64_t bytes(std::span<const std::int64_t> sent, std::span<const std::int64_t> received) {
    return offsets_of(sent).back() + offsets_of(received).back();
  }

  // Bytes of the block to a rank and of the block from it; where they begin in sent() and received().
  std::int64_t sent_bytes(int peer) const { return offset(sent_offsets_, peer + 1) - sent_offset(peer); }
  std::int64_t received_bytes(int peer) const {
    return offset(received_offsets_, peer + 1) - received_offset(peer);
  }
  std::int64_t sent_offset(int peer) const { return offset(sent_offsets_, peer); }
  std::int64_t received_offset(int peer) const { return offset(received_offsets_, peer); }
  std::byte* sent() const { return memory_.data(); }
  std::byte* received() const { return memory_.data() + sent_offsets_.back(); }

  Header& header_to(int peer) const { return *reinterpret_cast<Header*>(sent() + sent_offset(peer)); }
  const Header& header_from(int peer) const {
    return *reinterpret_cast<const Header*>(received() + received_offset(peer));
  }
  // A received block has not arrived() from forget() until it is received: calls are numbered from 1.
  void forget(int peer) const {
    reinterpret_cast<Header*>(received() + received_offset(peer))->call = 0;
    const std::uint64_t none = 0;
    std::memcpy(received() + end_of_received(peer), &none, sizeof none);
  }
  bool arrived(int peer) const { return peek(received() + received_offset(peer)) != 0; }
  bool arrived_whole(int peer) const {
    return arrived(peer) && peek(received() + end_of_received(peer)) != 0;
  }

  // Seals the block to a peer. Its header and content must be complete.
  void seal(int me, int peer) const {
    Header& header = header_to(peer);
    header.seal = seal_of(sent() + sent_offset(peer), header.sealed_bytes(), me, peer);
    const std::int64_t end = sent_offset(peer) + sent_bytes(peer) - kLastBytes;
    const std::uint64_t last = last_word(content_to(peer), sent() + end, header.seal);
    std::memcpy(sent() + end, &last, sizeof last);
  }
  // True if the received header, or the whole received block, is as the peer sealed it.
  bool is_sealed_header(int me, int peer) const {
    const Header& header = header_from(peer);
    return header.seal == seal_of(received() + received_offset(peer), header.sealed_bytes(), peer, me);
  }
  bool is_sealed(int me, int peer) const {
    const std::byte* const end = received() + end_of_received(peer);
    return is_sealed_header(me, peer) &&
           peek(end) == last_word(content_from(peer), end, header_from(peer).seal);
  }

  std::byte* content_to(int peer) const { return sent() + sent_offset(peer) + kHeaderBytes; }
  const std::byte* content_from(int peer) const { return received() + received_offset(peer) + kHeaderBytes; }

 private:
  static std::uint64_t last_word(const std::byte* content, const std::byte* end, std::uint64_t header) {
    return seal_of_content(content, end - content, header);
  }

  std::int64_t end_of_received(int peer) const {
    return received_offset(peer) + received_bytes(peer) - kLastBytes;
  }
  // [R + 1]
  static std::vector<std::int64_t> offsets_of(std::span<const std::int64_t> contents) {
    std::vector<std::int64_t> offsets{0};
    for (const std::int64_t bytes : contents)
      offsets.push_back(offsets.back() + kHeaderBytes + (bytes + kLastBytes + 63) / 64 * 64);
    return offsets;
  }
  static std::int64_t offset(const std::vector<std::int64_t>& offsets, int peer) {
    return offsets[static_cast<std::size_t>(peer)];
  }

  std::vector<std::int64_t> sent_offsets_, received_offsets_;  // [R + 1]
  LocalMemory memory_;
};

}  // namespace ferry::collective
