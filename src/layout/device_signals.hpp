// Where the signals of one lane lie in a GPU rank's symmetric memory.
//
//   letters         [2 generations][R sources]      what one rank tells another once a call
//   sent flags      [2 phases][2][R sources]        call number: nothing more of a phase comes from a source
//   dispatch flags  [2][R sources][T][kQuarters]    call number: the share of message i of a source that has
//                                                   this quarter as its first is here
//   slot notes      [2][R sources][T][K]            units: of a message's slots, or a value of each
//   combine flags   [2][combine rows][kQuarters]    call number: a quarter of a row of staging is here
//   unit rows       [2][unit rows][2 x row]         units: sums of combine that announce themselves
//
// Message i is that number or, where its source says so, that of token i.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "group/error_record.hpp"
#include "layout/exchange_layout.hpp"
#include "layout/ll_packet.hpp"

namespace ferry {

inline constexpr int kDeviceOptions = 12;
inline constexpr int kPayloads = 2;  // of a call that sends: combine's weights from home; everything else
inline constexpr int kDeviceArguments = 3;  // optional arguments whose presence is compared

// Rows are cut into quarters, so that several warps may share one. A quarter of a row of combine has a flag
// of its own, a share of a message of dispatch its first quarter's.
inline constexpr int kQuarters = 4;

// A letter is a run of units: what other calls left is never taken for this call's.
//
// Words of a letter: the hash of what all ranks have alike (0 in a refusal), then the HeaderFacts, then the
// options, then counts, two to a word: routes to the experts in the order of their ranks and local numbers
// (padded to an even number), then messages to the ranks.
inline constexpr int kHeaderTerms = 0, kHeaderFacts = 1, kHeaderOptions = 2;
inline constexpr int kHeaderCounts = kHeaderOptions + kDeviceOptions;

// What a rank says of itself, in one word.
struct HeaderFacts {
  std::int32_t count = 0;  // metadata: this rank's; otherwise its tokens
  std::uint8_t operation = 0;
  std::uint8_t argument[kDeviceArguments] = {2, 2, 2};  // 0 absent, 1 given, 2 either
  bool direct_write = false;  // dispatch: stores rows where they stay, at ranks that let it
  bool takes_rows = false;    // dispatch: lets others do so
  std::uint16_t runs = 1;     // dispatch: its messages come in so many runs side by side, each in order
  std::uint8_t splits = 0;  // dispatch: a row comes in 1 << splits shares, each with its first quarter's flag
  bool by_token = false;    // dispatch: its messages lie by token, and notes say which there are

  FERRY_HD constexpr std::uint64_t word() const {
    std::uint64_t packed =
        static_cast<std::uint32_t>(count) | std::uint64_t{operation} << 32 | std::uint64_t{by_token} << 39;
    packed |= (std::uint64_t{splits} & 1) << 38 | std::uint64_t{splits} >> 1 << 63;
    for (int i = 0; i < kDeviceArguments; ++i) packed |= std::uint64_t{argument[i]} << (40 + 2 * i);
    return packed | std::uint64_t{direct_write} << 46 | std::uint64_t{takes_rows} << 47 |
           std::uint64_t{runs} << 48;
  }
  FERRY_HD static constexpr HeaderFacts of(std::uint64_t word) {
    HeaderFacts facts;
    facts.count = static_cast<std::int32_t>(word);
    facts.operation = static_cast<std::uint8_t>(word >> 32 & 0x3f);
    facts.by_token = (word >> 39 & 1) != 0;
    for (int i = 0; i < kDeviceArguments; ++i)
      facts.argument[i] = static_cast<std::uint8_t>(word >> (40 + 2 * i) & 3);
    facts.direct_write = (word >> 46 & 1) != 0;
    facts.takes_rows = (word >> 47 & 1) != 0;
    facts.runs = static_cast<std::uint16_t>(word >> 48 & 0x7fff);
    facts.splits = static_cast<std::uint8_t>((word >> 38 & 1) | word >> 63 << 1);
    return facts;
  }
};

// A rank's first tokens, whose sums may go home in units.
inline constexpr std::int32_t kUnitTokens = 32;

// Made once by the host: device code only adds and multiplies. Counts of messages and rows fit 31 bits.
struct DeviceSignals {
  std::int32_t ranks, max_tokens, top_k, combine_rows;
  std::int32_t first_messages;  // index of the messages to rank 0 among a letter's counts
  std::int32_t count_words;     // of a letter
  std::int32_t header_bytes;
  std::int32_t refusal_offset;  // in a letter
  std::int32_t ll_rows;         // of one generation, from the first kUnitTokens tokens
  std::int64_t sent_begin, flags_begin, notes_begin, combine_begin, units_begin;
  std::int64_t unit_row_bytes;
  std::int64_t bytes;

  // `sum_bytes`: of a row of combine.
  static constexpr DeviceSignals of(std::int32_t ranks, std::int32_t experts, std::int32_t max_tokens,
                                    std::int32_t top_k, std::int64_t combine_rows, std::int64_t sum_bytes) {
    constexpr auto lines = [](std::int64_t size) { return (size + 127) / 128 * 128; };
    constexpr std::int64_t kUnit = sizeof(LLPacket), kFlags = 8 * kQuarters;
    DeviceSignals s{};
    s.ranks = ranks;
    s.max_tokens = max_tokens;
    s.top_k = top_k;
    s.combine_rows = static_cast<std::int32_t>(combine_rows);
    s.first_messages = (experts + 1) / 2 * 2;
    s.count_words = (s.first_messages + ranks + 1) / 2;
    s.refusal_offset = static_cast<std::int32_t>((kHeaderCounts + s.count_words) * kUnit);
    s.header_bytes =
        static_cast<std::int32_t>(lines(s.refusal_offset + static_cast<std::int64_t>(sizeof(ErrorRecord))));
    const std::int64_t messages = 2 * std::int64_t{ranks} * max_tokens;
    s.sent_begin = 2 * std::int64_t{ranks} * s.header_bytes;
    s.flags_begin = lines(s.sent_begin + 8 * 2 * kPayloads * std::int64_t{ranks});
    s.notes_begin = s.flags_begin + kFlags * messages;
    s.combine_begin = s.notes_begin + kUnit * top_k * messages;
    s.units_begin = lines(s.combine_begin + 2 * kFlags * combine_rows);
    s.ll_rows = (max_tokens < kUnitTokens ? max_tokens : kUnitTokens) * (top_k < ranks ? top_k : ranks);
    s.unit_row_bytes = 2 * ((sum_bytes + 511) / 512 * 512);
    s.bytes = s.units_begin + 2 * s.ll_rows * s.unit_row_bytes;
    return s;
  }

  FERRY_HD constexpr std::int64_t header(int parity, int source) const {
    return std::int64_t{parity * ranks + source} * header_bytes;
  }
  FERRY_HD constexpr std::int64_t end_of_stream_flag(int phase, int parity, int source) const {
    return sent_begin + 8 * std::int64_t{(2 * phase + parity) * ranks + source};
  }
  // Of a message's or row's first quarter; the others follow. Multiples of 32.
  FERRY_HD constexpr std::int64_t dispatch_flags(int parity, int source, std::int32_t i) const {
    return flags_begin + 8 * kQuarters * std::int64_t{message(parity, source, i)};
  }
  FERRY_HD constexpr std::int64_t slot_notes(int parity, int source, std::int32_t i) const {
    return notes_begin + static_cast<std::int64_t>(sizeof(LLPacket)) * top_k * message(parity, source, i);
  }
  FERRY_HD constexpr std::int64_t combine_flags(int parity, std::int32_t row) const {
    return combine_begin + 8 * kQuarters * std::int64_t{parity * combine_rows + row};
  }
  // Of a row of combine that travels in units.
  FERRY_HD constexpr std::int64_t unit_row(int parity, std::int32_t row) const {
    return units_begin + unit_row_bytes * (parity * ll_rows + row);
  }

 private:
  FERRY_HD constexpr std::int32_t message(int parity, int source, std::int32_t i) const {
    return (parity * ranks + source) * max_tokens + i;
  }
};

}  // namespace ferry
