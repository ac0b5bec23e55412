// Words through which GPUs signal, and those of one lane: the headers, flags and metadata in a GPU rank's
// symmetric memory, which its peers write.
//
//   call headers         [2][R sources]                one from each rank, once a call
//   end-of-stream flags  [2 payloads][2][R sources]    the source sends no more of this payload
//   dispatch flags       [2][R sources][T][kQuarters]  a segment of a row has arrived
//   slot metadata        [2][R sources][T][K]          LL packets: of a message's slots, or a value each
//   combine flags        [2][combine rows][kQuarters]  a quarter of a staging row has arrived
//   LL rows              [2][LL rows][2 x row bytes]   LL packets: combine's sums of few tokens
//
// [2] is the buffer parity, call number & 1. A flag holds the number of the last call that set it. The
// messages of a source are indexed by their number or, where its header says so, by their token.
#pragma once

#include <cstdint>

#include "base/errors.hpp"
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

inline constexpr int kDeviceOptions = 13;
inline constexpr int kPayloads = 2;         // values of Payload (lane_view.hpp)
inline constexpr int kDeviceArguments = 2;  // optional arguments whose presence is compared

// Rows are cut at quarters, so that several warps can work on one. Each quarter of a combine row has a flag
// of its own; a segment of a dispatch row (1, 2 or 4 quarters) has the flag of its first quarter.
inline constexpr int kQuarters = 4;

// A call header is a run of LL packets, so a reader never takes words of an earlier call for this call's.
//
// Words of a header: the hash of the terms, which all ranks must pass alike (0 in a refusal); the
// HeaderFacts; the options; the counts, two to a word: routes to each expert by physical index (padded to an
// even number), then messages to each rank.
inline constexpr int kHeaderTerms = 0, kHeaderFacts = 1, kHeaderOptions = 2;
inline constexpr int kHeaderCounts = kHeaderOptions + kDeviceOptions;
// The last option is not compared: in a dispatch it is the rank's DispatchCall::row_limit(), 0 without one.
inline constexpr int kRowLimitOption = kDeviceOptions - 1;
// The option before it is the epoch of the rank, which kernels read from device memory.
inline constexpr int kEpochOption = kDeviceOptions - 2;

// Facts about one rank's call, in one word of its header.
struct HeaderFacts {
  std::int32_t count = 0;  // the operation `metadata`: this rank's count; otherwise its tokens
  std::uint8_t operation = 0;
  std::uint8_t argument[kDeviceArguments] = {2, 2};  // 0 absent, 1 given, 2 either
  // For a dispatch:
  bool direct_write = false;           // writes rows to their final position at ranks that accept it
  bool accepts_direct_writes = false;  // lets peers do so
  std::uint16_t sender_warps = 1;      // warps that send; each sends consecutive messages in order
  std::uint8_t log2_segments = 0;      // of a row
  bool token_indexed = false;  // messages are indexed by token; the metadata says which tokens have one
  bool limits_rows = false;    // the header has a row limit

  FERRY_HD constexpr std::uint64_t word() const {
    std::uint64_t packed = static_cast<std::uint32_t>(count) | std::uint64_t{operation} << 32 |
                           std::uint64_t{token_indexed} << 39;
    packed |= (std::uint64_t{log2_segments} & 1) << 38 | std::uint64_t{log2_segments} >> 1 << 63;
    for (int i = 0; i < kDeviceArguments; ++i) packed |= std::uint64_t{argument[i]} << (40 + 2 * i);
    return packed | std::uint64_t{direct_write} << 46 | std::uint64_t{accepts_direct_writes} << 47 |
           std::uint64_t{sender_warps} << 48 | std::uint64_t{limits_rows} << 62;
  }
  FERRY_HD static constexpr HeaderFacts of(std::uint64_t word) {
    HeaderFacts facts;
    facts.count = static_cast<std::int32_t>(word);
    facts.operation = static_cast<std::uint8_t>(word >> 32 & 0x3f);
    facts.token_indexed = (word >> 39 & 1) != 0;
    for (int i = 0; i < kDeviceArguments; ++i)
      facts.argument[i] = static_cast<std::uint8_t>(word >> (40 + 2 * i) & 3);
    facts.direct_write = (word >> 46 & 1) != 0;
    facts.accepts_direct_writes = (word >> 47 & 1) != 0;
    facts.sender_warps = static_cast<std::uint16_t>(word >> 48 & 0x3fff);
    facts.limits_rows = (word >> 62 & 1) != 0;
    facts.log2_segments = static_cast<std::uint8_t>((word >> 38 & 1) | word >> 63 << 1);
    return facts;
  }
};

// Combine's sums of a rank's first kLLTokens tokens may travel as LL packets.
inline constexpr std::int32_t kLLTokens = 32;

// Addresses of items that each source rank stores: item `i` of `source` in the buffer of `parity`. Bytes.
struct SignalArray {
  std::int64_t begin, parity_stride, source_stride, item_stride;

  FERRY_HD constexpr std::int64_t at(int parity, int source, std::int32_t i = 0) const {
    return begin + parity * parity_stride + source * source_stride + i * item_stride;
  }
};

struct SignalSizes {
  std::int32_t ranks, experts, max_tokens, top_k;
  std::int64_t combine_rows;
  std::int64_t sum_bytes;       // of a row of combine's staging
  std::int32_t most_ranks = 0;  // destinations of a token; 0: min(K, R)
};

// Byte offsets of the signals in a lane's section. The host computes what needs divisions, so that device
// code only adds and multiplies. Numbers of messages and rows fit 31 bits.
struct DeviceSignals {
  std::int32_t ranks, max_tokens, top_k, combine_rows;
  std::int32_t first_messages;  // index of the messages to rank 0 among a header's counts
  std::int32_t count_words;     // of a header
  std::int32_t header_bytes;
  std::int32_t refusal_offset;  // in a header
  std::int32_t ll_rows;         // of one parity, for the first kLLTokens tokens
  SignalArray headers;
  SignalArray end_of_stream[kPayloads];
  SignalArray flags;     // item: a message
  SignalArray metadata;  // item: a message
  std::int64_t combine_begin, ll_begin;
  std::int64_t ll_row_bytes;
  std::int64_t bytes;

  static constexpr DeviceSignals of(const SignalSizes& sizes) {
    auto [ranks, experts, max_tokens, top_k, combine_rows, sum_bytes, most_ranks] = sizes;
    constexpr auto lines = [](std::int64_t size) { return (size + 127) / 128 * 128; };
    constexpr std::int64_t kPacket = sizeof(LLPacket), kFlags = 8 * kQuarters;
    DeviceSignals s{};
    s.ranks = ranks;
    s.max_tokens = max_tokens;
    s.top_k = top_k;
    s.combine_rows = static_cast<std::int32_t>(combine_rows);
    s.first_messages = (experts + 1) / 2 * 2;
    s.count_words = (s.first_messages + ranks + 1) / 2;
    s.refusal_offset = static_cast<std::int32_t>((kHeaderCounts + s.count_words) * kPacket);
    s.header_bytes =
        static_cast<std::int32_t>(lines(s.refusal_offset + static_cast<std::int64_t>(sizeof(ErrorRecord))));
    const std::int64_t messages = std::int64_t{ranks} * max_tokens, slots = kPacket * top_k;
    s.headers = {0, std::int64_t{ranks} * s.header_bytes, s.header_bytes, 0};
    std::int64_t end = 2 * s.headers.parity_stride;
    for (SignalArray& payload : s.end_of_stream) {
      payload = {end, 8 * std::int64_t{ranks}, 8, 0};
      end += 2 * payload.parity_stride;
    }
    s.flags = {lines(end), kFlags * messages, kFlags * max_tokens, kFlags};
    s.metadata = {s.flags.begin + 2 * s.flags.parity_stride, slots * messages, slots * max_tokens, slots};
    s.combine_begin = s.metadata.begin + 2 * s.metadata.parity_stride;
    s.ll_begin = lines(s.combine_begin + 2 * kFlags * combine_rows);
    if (most_ranks == 0) most_ranks = top_k < ranks ? top_k : ranks;
    s.ll_rows = (max_tokens < kLLTokens ? max_tokens : kLLTokens) * most_ranks;
    s.ll_row_bytes = 2 * ((sum_bytes + 511) / 512 * 512);
    s.bytes = s.ll_begin + 2 * s.ll_rows * s.ll_row_bytes;
    return s;
  }

  FERRY_HD constexpr std::int64_t header(int parity, int source) const { return headers.at(parity, source); }
  FERRY_HD constexpr std::int64_t end_of_stream_flag(int payload, int parity, int source) const {
    return end_of_stream[payload].at(parity, source);
  }
  // Flags: of the first quarter; the others follow. Multiples of 32.
  FERRY_HD constexpr std::int64_t dispatch_flags(int parity, int source, std::int32_t i) const {
    return flags.at(parity, source, i);
  }
  FERRY_HD constexpr std::int64_t slot_metadata(int parity, int source, std::int32_t i) const {
    return metadata.at(parity, source, i);
  }
  FERRY_HD constexpr std::int64_t combine_flags(int parity, std::int32_t row) const {
    return combine_begin + 8 * kQuarters * std::int64_t{parity * combine_rows + row};
  }
  // A row of combine that travels as LL packets.
  FERRY_HD constexpr std::int64_t ll_row(int parity, std::int32_t row) const {
    return ll_begin + ll_row_bytes * (parity * ll_rows + row);
  }
};

}  // namespace ferry
