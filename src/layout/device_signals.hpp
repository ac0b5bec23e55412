// Where the signals of one lane lie in a GPU rank's symmetric memory.
//
//   letters         [2 generations][R sources]      what one rank tells another once a call
//   sent flags      [2 phases][2][R sources]        call number: nothing more of a phase comes from a source
//   dispatch flags  [2][R sources][T][kQuarters]    call number: a quarter of message i of a source is here
//   combine flags   [2][combine rows][kQuarters]    call number: a quarter of a row of combine's staging is
//   here
#pragma once

#include <cstdint>

#include "core/error_record.hpp"
#include "layout/exchange_layout.hpp"
#include "layout/host_device.hpp"

namespace ferry {

inline constexpr int kDeviceOptions = 12;
inline constexpr int kPhases = 2;  // of a call that sends: combine's weights from home, then everything else
inline constexpr int kDeviceArguments = 3;  // optional arguments whose presence is compared

// Rows travel in quarters, so that several warps may share one: each has a flag of its own.
inline constexpr int kQuarters = 4;

// A letter is a run of units, each stored by one access of 16 bytes: a reader that finds the call's number
// has the word beside it as well, and what other calls left is never taken for this call's.
struct alignas(16) LetterUnit {
  std::uint64_t call;
  std::uint64_t word;
};

// Words of a letter: the hash of what all ranks have alike (0 in a refusal), then the LetterFacts, then the
// options, then counts, two to a word: routes to the experts in the order of their ranks and local numbers
// (padded to an even number), then messages to the ranks.
inline constexpr int kLetterTerms = 0, kLetterFacts = 1, kLetterOptions = 2;
inline constexpr int kLetterCounts = kLetterOptions + kDeviceOptions;

// What a rank says of itself, in one word.
struct LetterFacts {
  std::int32_t count = 0;  // metadata: this rank's; otherwise its tokens
  std::uint8_t operation = 0;
  std::uint8_t argument[kDeviceArguments] = {2, 2, 2};  // 0 absent, 1 given, 2 either
  bool places_rows = false;  // dispatch: stores rows where they stay, at ranks that let it
  bool takes_rows = false;   // dispatch: lets others do so
  std::uint16_t runs = 1;    // dispatch: its messages come in so many runs side by side, each in order
  bool quarters =
      false;  // dispatch: quarters of a row are announced apart; otherwise the first's flag says all

  FERRY_HD constexpr std::uint64_t word() const {
    std::uint64_t packed = static_cast<std::uint32_t>(count) | std::uint64_t{operation} << 32;
    for (int i = 0; i < kDeviceArguments; ++i) packed |= std::uint64_t{argument[i]} << (40 + 2 * i);
    return packed | std::uint64_t{places_rows} << 46 | std::uint64_t{takes_rows} << 47 |
           std::uint64_t{runs} << 48 | std::uint64_t{quarters} << 63;
  }
  FERRY_HD static constexpr LetterFacts of(std::uint64_t word) {
    LetterFacts facts;
    facts.count = static_cast<std::int32_t>(word);
    facts.operation = static_cast<std::uint8_t>(word >> 32);
    for (int i = 0; i < kDeviceArguments; ++i)
      facts.argument[i] = static_cast<std::uint8_t>(word >> (40 + 2 * i) & 3);
    facts.places_rows = (word >> 46 & 1) != 0;
    facts.takes_rows = (word >> 47 & 1) != 0;
    facts.runs = static_cast<std::uint16_t>(word >> 48 & 0x7fff);
    facts.quarters = word >> 63 != 0;
    return facts;
  }
};

struct DeviceSignals {
  std::int32_t ranks, experts, max_tokens;
  std::int64_t combine_rows;

  FERRY_HD constexpr std::int32_t first_messages() const { return (experts + 1) / 2 * 2; }
  FERRY_HD constexpr std::int32_t count_words() const { return (first_messages() + ranks + 1) / 2; }
  FERRY_HD constexpr std::int64_t refusal_offset() const {
    return (kLetterCounts + count_words()) * static_cast<std::int64_t>(sizeof(LetterUnit));
  }
  FERRY_HD constexpr std::int64_t letter_bytes() const {
    return (refusal_offset() + static_cast<std::int64_t>(sizeof(ErrorRecord)) + 127) / 128 * 128;
  }
  FERRY_HD constexpr std::int64_t letter(int generation, int source) const {
    return (std::int64_t{generation} * ranks + source) * letter_bytes();
  }
  FERRY_HD constexpr std::int64_t sent_flag(int phase, int generation, int source) const {
    return letter(2, 0) + 8 * ((2 * std::int64_t{phase} + generation) * ranks + source);
  }
  // Of a message's or row's first quarter; the others follow. Multiples of 32.
  FERRY_HD constexpr std::int64_t dispatch_flags(int generation, int source, std::int64_t i) const {
    const std::int64_t begin = (sent_flag(2, 0, 0) + 127) / 128 * 128;
    return begin + 8 * kQuarters * ((std::int64_t{generation} * ranks + source) * max_tokens + i);
  }
  FERRY_HD constexpr std::int64_t combine_flags(int generation, std::int64_t row) const {
    return dispatch_flags(2, 0, 0) + 8 * kQuarters * (generation * combine_rows + row);
  }
  FERRY_HD constexpr std::int64_t bytes() const { return combine_flags(2, 0); }
};

}  // namespace ferry
