// Arithmetic that host and devices share: divisions by multiplication, packed slot metadata and header facts,
// the layout of signals, the partition of sends.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "backends/cuda/dispatch/send_partition.hpp"
#include "base/integers.hpp"
#include "layout/device_signals.hpp"
#include "seed.hpp"

namespace ferry {
namespace {

TEST(Divisor, DividesEveryNumberNearAMultipleAndAtRandom) {
  std::mt19937_64 random(test::seed());
  std::vector<std::int32_t> divisors{1,      2, 3, 5, 7, 31, 32, 33, 127, 128, 1000, 1 << 20, (1 << 30) - 1,
                                     1 << 30};
  for (int i = 0; i < 200; ++i) divisors.push_back(static_cast<std::int32_t>(random() % (1 << 30)) + 1);
  for (const std::int32_t divisor : divisors) {
    const Divisor by = Divisor::of(divisor);
    const auto check = [&](std::int64_t n) {
      if (n < 0 || n > INT32_MAX) return;
      const auto of = static_cast<std::int32_t>(n);
      ASSERT_EQ(by.quotient(of), of / divisor) << of << " / " << divisor;
    };
    for (int i = 0; i < 200; ++i) {
      const auto multiple =
          static_cast<std::int64_t>(random() % (INT32_MAX / static_cast<unsigned>(divisor) + 1)) * divisor;
      for (std::int64_t n = multiple - 1; n <= multiple + 1; ++n) check(n);
      check(static_cast<std::int64_t>(random() >> 33));
    }
    check(INT32_MAX);
    check(INT32_MAX - 1);
  }
}

TEST(Divisor, RoundsUp) {
  EXPECT_EQ(Divisor::of(128).round_up(0), 0);
  EXPECT_EQ(Divisor::of(128).round_up(1), 128);
  EXPECT_EQ(Divisor::of(24).round_up(24), 24);
  EXPECT_EQ(Divisor::of(24).round_up(25), 48);
}

TEST(SlotMetadata, KeepsEveryFieldAtItsLimits) {
  std::mt19937_64 random(test::seed());
  const auto one_of = [&](std::int64_t least, std::int64_t most) {
    const auto pick = random() % 4;
    if (pick == 0) return least;
    if (pick == 1) return most;
    return least + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most - least + 1));
  };
  for (int i = 0; i < 100'000; ++i) {
    SlotMetadata metadata;
    metadata.token = static_cast<std::int32_t>(one_of(0, SlotMetadata::kMostTokens - 1));
    metadata.group = static_cast<std::int32_t>(one_of(-1, 1023));
    metadata.first_of_lower = metadata.group < 0 && random() % 2 == 0;
    metadata.ordinal = static_cast<std::int32_t>(one_of(0, SlotMetadata::kMostOrdinals - 1));
    metadata.weight = float_of(static_cast<std::uint32_t>(random()));
    const auto call = static_cast<std::uint64_t>(one_of(1, (std::int64_t{1} << 44) - 1));
    const LLPacket packet = metadata.packet(call);
    const SlotMetadata read = SlotMetadata::of(packet);
    ASSERT_EQ(packet.call >> SlotMetadata::kTokenBits, call);
    ASSERT_EQ(read.token, metadata.token);
    ASSERT_EQ(read.group, metadata.group);
    ASSERT_EQ(read.first_of_lower, metadata.first_of_lower);
    ASSERT_EQ(read.ordinal, metadata.ordinal);
    ASSERT_EQ(bits_of(read.weight), bits_of(metadata.weight));
  }
}

TEST(HeaderFacts, KeepEveryFieldAtItsLimits) {
  for (const std::int32_t count : {0, 1, INT32_MAX}) {
    for (const std::uint16_t warps : {0, 1, 0x3fff}) {
      for (unsigned bits = 0; bits < 16; ++bits) {
        HeaderFacts facts;
        facts.count = count;
        facts.operation = static_cast<std::uint8_t>(bits == 0 ? 0x3f : bits);
        for (int i = 0; i < kDeviceArguments; ++i)
          facts.argument[i] = static_cast<std::uint8_t>((bits + i) % 3);
        facts.sender_warps = warps;
        facts.direct_write = (bits & 1) != 0;
        facts.accepts_direct_writes = (bits & 2) != 0;
        facts.log2_segments = static_cast<std::uint8_t>(bits % 3);
        facts.token_indexed = (bits & 8) != 0;
        facts.limits_rows = (bits & 4) != 0;
        const HeaderFacts read = HeaderFacts::of(facts.word());
        EXPECT_EQ(read.count, facts.count);
        EXPECT_EQ(read.operation, facts.operation);
        for (int i = 0; i < kDeviceArguments; ++i) EXPECT_EQ(read.argument[i], facts.argument[i]);
        EXPECT_EQ(read.sender_warps, facts.sender_warps);
        EXPECT_EQ(read.direct_write, facts.direct_write);
        EXPECT_EQ(read.accepts_direct_writes, facts.accepts_direct_writes);
        EXPECT_EQ(read.log2_segments, facts.log2_segments);
        EXPECT_EQ(read.token_indexed, facts.token_indexed);
        EXPECT_EQ(read.limits_rows, facts.limits_rows);
      }
    }
  }
}

TEST(DeviceSignals, NothingLiesOnAnythingElse) {
  constexpr int kRanks = 3, kTokens = 5, kTopK = 3, kRows = 7, kSumBytes = 528;
  const DeviceSignals signals = DeviceSignals::of({kRanks, 9, kTokens, kTopK, kRows, kSumBytes});
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;  // begin, end
  for (int parity = 0; parity < 2; ++parity) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::int64_t header = signals.header(parity, rank);
      pieces.emplace_back(header, header + signals.header_bytes);
      EXPECT_LE(signals.refusal_offset + static_cast<std::int64_t>(sizeof(ErrorRecord)),
                signals.header_bytes);
      for (int payload = 0; payload < kPayloads; ++payload) {
        const std::int64_t flag = signals.end_of_stream_flag(payload, parity, rank);
        pieces.emplace_back(flag, flag + 8);
      }
      for (int i = 0; i < kTokens; ++i) {
        const std::int64_t flags = signals.dispatch_flags(parity, rank, i),
                           metadata = signals.slot_metadata(parity, rank, i);
        EXPECT_EQ(flags % 32, 0);
        EXPECT_EQ(metadata % 16, 0);
        pieces.emplace_back(flags, flags + 8 * kQuarters);
        pieces.emplace_back(metadata, metadata + 16 * kTopK);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const std::int64_t flags = signals.combine_flags(parity, row);
      EXPECT_EQ(flags % 32, 0);
      pieces.emplace_back(flags, flags + 8 * kQuarters);
    }
    for (int row = 0; row < kTokens * kRanks; ++row) {  // one for each token and destination
      const std::int64_t row_begin = signals.ll_row(parity, row);
      EXPECT_EQ(row_begin % 16, 0);
      pieces.emplace_back(row_begin,
                          row_begin + 2 * 1024);  // kSumBytes in whole blocks of 512 bytes, doubled
    }
  }
  std::sort(pieces.begin(), pieces.end());
  for (std::size_t i = 1; i < pieces.size(); ++i) EXPECT_LE(pieces[i - 1].second, pieces[i].first);
  EXPECT_EQ(pieces.back().second, signals.bytes);
}

TEST(SendPartition, EverySegmentHasOneWorker) {
  for (const int senders : {1, 3, 39}) {
    for (const int tokens : {0, 1, 2, 6, 7, 52, 128, 1000, 4096}) {
      const auto partition = cuda::SendPartition::of(tokens, senders);
      EXPECT_EQ(partition.segment_begin(0), 0);
      EXPECT_EQ(partition.segment_begin(partition.workers), tokens << partition.log2_segments);
      for (int token = 0; token < tokens; ++token) {
        const int worker = partition.last_worker(token);
        EXPECT_LE(partition.token_begin(worker), token) << tokens << " tokens, " << senders << " senders";
        if (worker + 1 < partition.workers) {
          EXPECT_GT(partition.token_begin(worker + 1), token);
        }
      }
    }
  }
}

TEST(SendPartition, WorkersOfATokenAreThoseWithItsSegments) {
  for (const int senders : {1, 3, 39}) {
    for (const int tokens : {0, 1, 2, 6, 7, 52, 128, 1000}) {
      const auto partition = cuda::SendPartition::of(tokens, senders);
      for (int worker = 0; worker < partition.workers; ++worker) {
        const int begin = partition.segment_begin(worker), end = partition.segment_begin(worker + 1);
        const int wanted =
            begin == end ? 0
                         : ((end - 1) >> partition.log2_segments) - (begin >> partition.log2_segments) + 1;
        EXPECT_EQ(partition.token_end(worker) - partition.token_begin(worker), wanted)
            << tokens << " tokens, " << senders << " senders, worker " << worker;
        // Where rows are cut, a worker has one segment at most: send_segments() relies on it.
        if (partition.log2_segments > 0) {
          EXPECT_LE(end - begin, 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry
