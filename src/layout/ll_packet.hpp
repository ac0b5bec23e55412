// Words in memory through which GPUs signal: flags, LL packets, and the metadata of slots, which are LL
// packets.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "format/numbers.hpp"

namespace ferry {

// All accesses to a flag, by kernels and by the host, are 8 bytes wide, because memory models order only
// accesses of the same width. The type ensures it: functions for flags take nothing else, and words of an
// LLPacket are not flags.
struct Flag {
  std::uint64_t value;  // a call number, or 0 and 1
};
static_assert(sizeof(Flag) == 8 && alignof(Flag) == 8);

// LL packets, as in NCCL's protocol LL: a flag and eight bytes of data in one 16-byte store, so that data
// needs no fence and no flag of its own. A reader that sees the call number has the word as well.
struct alignas(16) LLPacket {
  std::uint64_t call;  // the flag: a call number, above other bits in slot metadata
  std::uint64_t word;
};

// What a receiver must know about a slot of a message: one LL packet, from which it places the slot's row.
//
// The receiver finds the row without a scan of its own: it is the first row of (expert, source) plus
// `ordinal`. Metadata does not wait for the row, which has
// flags of its own.
struct SlotMetadata {
  static constexpr std::int32_t kElsewhere = -1;
  static constexpr int kTokenBits = 20;  // of LLPacket::call, below the call number
  static constexpr int kGroupBits = 11;  // of LLPacket::word
  static constexpr std::int32_t kMostTokens = (1 << kTokenBits) - 1;
  static constexpr std::int64_t kMostOrdinals = std::int64_t{1} << (32 - kGroupBits);

  static constexpr std::int32_t kNoMessage = kMostTokens;

  std::int32_t token = 0;  // where messages are indexed by token: the message's number, or kNoMessage
  std::int32_t group = kElsewhere;  // of the expert at the receiver: with rank_major, its local number
  bool first_of_lower = false;      // of kElsewhere: the token's first slot at some rank below the receiver
  std::int32_t ordinal = 0;         // routes of the source to the same expert before this one
  float weight = 0;

  FERRY_HD LLPacket packet(std::uint64_t call) const {
    const std::uint32_t where =
        group >= 0 ? static_cast<std::uint32_t>(group) : kOtherRank + (first_of_lower ? 1 : 0);
    return {call << kTokenBits | static_cast<std::uint64_t>(token),
            where | static_cast<std::uint64_t>(static_cast<std::uint32_t>(ordinal)) << kGroupBits |
                std::uint64_t{bits_of(weight)} << 32};
  }
  FERRY_HD static SlotMetadata of(const LLPacket& packet) {
    SlotMetadata metadata;
    const auto low = static_cast<std::uint32_t>(packet.word), where = low & ((1u << kGroupBits) - 1);
    metadata.token = static_cast<std::int32_t>(packet.call & kMostTokens);
    metadata.group = where < kOtherRank ? static_cast<std::int32_t>(where) : kElsewhere;
    metadata.first_of_lower = where == kOtherRank + 1;
    metadata.ordinal = static_cast<std::int32_t>(low >> kGroupBits);
    metadata.weight = float_of(static_cast<std::uint32_t>(packet.word >> 32));
    return metadata;
  }

 private:
  static constexpr std::uint32_t kOtherRank = 1u << (kGroupBits - 1);
};

}  // namespace ferry
