// Slot metadata: one LL packet for each slot of a message between GPUs, from which the receiver places the
// slot's row.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "format/fp32.hpp"
#include "layout/ll_packet.hpp"

namespace ferry {

// The receiver finds the slot's row without a scan of its own: it is the first row of (expert, source) plus
// `ordinal`. Metadata does not wait for the message's row, which has flags of its own.
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
