// What a message between GPUs says of each slot of its token.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "format/fp32.hpp"
#include "layout/ll_packet.hpp"

namespace ferry {

// What the receiver of a message must know of one slot. With the number of routes of the same rank to the
// same expert before this one it needs no scan of its own to place a row: the first row of (expert, source)
// plus this number. Notes do not wait for the row, which comes with flags of its own.
struct SlotMetadata {
  static constexpr std::int32_t kElsewhere = -1;
  static constexpr int kTokenBits = 20, kLocalBits = 11;  // beside the call's number; in the word
  static constexpr std::int32_t kMostTokens = (1 << kTokenBits) - 1;
  static constexpr std::int64_t kMostOrdinals = std::int64_t{1} << (32 - kLocalBits);

  static constexpr std::int32_t kNoMessage = kMostTokens;

  std::int32_t token = 0;           // where messages lie by token: the message's number, or kNoMessage
  std::int32_t local = kElsewhere;  // its expert's number at the receiver
  bool first_of_lower = false;      // elsewhere: the token's first slot at a rank below the receiver
  std::int32_t ordinal = 0;
  float weight = 0;

  FERRY_HD LLPacket unit(std::uint64_t call) const {
    const std::uint32_t where =
        local >= 0 ? static_cast<std::uint32_t>(local) : kNobody + (first_of_lower ? 1 : 0);
    return {call << kTokenBits | static_cast<std::uint64_t>(token),
            where | static_cast<std::uint64_t>(static_cast<std::uint32_t>(ordinal)) << kLocalBits |
                std::uint64_t{bits_of(weight)} << 32};
  }
  FERRY_HD static SlotMetadata of(const LLPacket& unit) {
    SlotMetadata note;
    const auto low = static_cast<std::uint32_t>(unit.word), where = low & ((1u << kLocalBits) - 1);
    note.token = static_cast<std::int32_t>(unit.call & kMostTokens);
    note.local = where < kNobody ? static_cast<std::int32_t>(where) : kElsewhere;
    note.first_of_lower = where == kNobody + 1;
    note.ordinal = static_cast<std::int32_t>(low >> kLocalBits);
    note.weight = float_of(static_cast<std::uint32_t>(unit.word >> 32));
    return note;
  }

 private:
  static constexpr std::uint32_t kNobody = 1u << (kLocalBits - 1);
};

}  // namespace ferry
