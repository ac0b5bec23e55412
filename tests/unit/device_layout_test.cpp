// What host and devices reckon alike: divisions without dividing, notes of a slot in 16 bytes, where signals
// lie, who sends what.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "backends/cuda/dispatch/send_partition.hpp"
#include "layout/device_signals.hpp"
#include "layout/divisor.hpp"
#include "layout/slot_metadata.hpp"
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
    SlotMetadata note;
    note.token = static_cast<std::int32_t>(one_of(0, SlotMetadata::kMostTokens - 1));
    note.local = static_cast<std::int32_t>(one_of(-1, 1023));
    note.first_of_lower = note.local < 0 && random() % 2 == 0;
    note.ordinal = static_cast<std::int32_t>(one_of(0, SlotMetadata::kMostOrdinals - 1));
    note.weight = float_of(static_cast<std::uint32_t>(random()));
    const auto call = static_cast<std::uint64_t>(one_of(1, (std::int64_t{1} << 44) - 1));
    const LLPacket unit = note.unit(call);
    const SlotMetadata read = SlotMetadata::of(unit);
    ASSERT_EQ(unit.call >> SlotMetadata::kTokenBits, call);
    ASSERT_EQ(read.token, note.token);
    ASSERT_EQ(read.local, note.local);
    ASSERT_EQ(read.first_of_lower, note.first_of_lower);
    ASSERT_EQ(read.ordinal, note.ordinal);
    ASSERT_EQ(bits_of(read.weight), bits_of(note.weight));
  }
}

TEST(HeaderFacts, KeepEveryFieldAtItsLimits) {
  for (const std::int32_t count : {0, 1, INT32_MAX}) {
    for (const std::uint16_t runs : {0, 1, 0x7fff}) {
      for (unsigned bits = 0; bits < 16; ++bits) {
        HeaderFacts facts;
        facts.count = count;
        facts.operation = static_cast<std::uint8_t>(bits == 0 ? 0x3f : bits);
        for (int i = 0; i < kDeviceArguments; ++i)
          facts.argument[i] = static_cast<std::uint8_t>((bits + i) % 3);
        facts.runs = runs;
        facts.direct_write = (bits & 1) != 0;
        facts.takes_rows = (bits & 2) != 0;
        facts.splits = static_cast<std::uint8_t>(bits % 3);
        facts.by_token = (bits & 8) != 0;
        const HeaderFacts read = HeaderFacts::of(facts.word());
        EXPECT_EQ(read.count, facts.count);
        EXPECT_EQ(read.operation, facts.operation);
        for (int i = 0; i < kDeviceArguments; ++i) EXPECT_EQ(read.argument[i], facts.argument[i]);
        EXPECT_EQ(read.runs, facts.runs);
        EXPECT_EQ(read.direct_write, facts.direct_write);
        EXPECT_EQ(read.takes_rows, facts.takes_rows);
        EXPECT_EQ(read.splits, facts.splits);
        EXPECT_EQ(read.by_token, facts.by_token);
      }
    }
  }
}

TEST(DeviceSignals, NothingLiesOnAnythingElse) {
  constexpr int kRanks = 3, kTokens = 5, kTopK = 3, kRows = 7, kSumBytes = 528;
  const DeviceSignals signals = DeviceSignals::of(kRanks, 9, kTokens, kTopK, kRows, kSumBytes);
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;  // begin, end
  for (int parity = 0; parity < 2; ++parity) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::int64_t header = signals.header(parity, rank);
      pieces.emplace_back(header, header + signals.header_bytes);
      EXPECT_LE(signals.refusal_offset + static_cast<std::int64_t>(sizeof(ErrorRecord)),
                signals.header_bytes);
      for (int phase = 0; phase < kPayloads; ++phase) {
        const std::int64_t sent = signals.end_of_stream_flag(phase, parity, rank);
        pieces.emplace_back(sent, sent + 8);
      }
      for (int i = 0; i < kTokens; ++i) {
        const std::int64_t flags = signals.dispatch_flags(parity, rank, i),
                           notes = signals.slot_notes(parity, rank, i);
        EXPECT_EQ(flags % 32, 0);
        EXPECT_EQ(notes % 16, 0);
        pieces.emplace_back(flags, flags + 8 * kQuarters);
        pieces.emplace_back(notes, notes + 16 * kTopK);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const std::int64_t flags = signals.combine_flags(parity, row);
      EXPECT_EQ(flags % 32, 0);
      pieces.emplace_back(flags, flags + 8 * kQuarters);
    }
    for (int row = 0; row < kTokens * kRanks; ++row) {  // one a token and rank it reaches
      const std::int64_t units = signals.unit_row(parity, row);
      EXPECT_EQ(units % 16, 0);
      pieces.emplace_back(units, units + 2 * 1024);  // of each 512 bytes that a sum begins
    }
  }
  std::sort(pieces.begin(), pieces.end());
  for (std::size_t i = 1; i < pieces.size(); ++i) EXPECT_LE(pieces[i - 1].second, pieces[i].first);
  EXPECT_EQ(pieces.back().second, signals.bytes);
}

TEST(SendPartition, EveryUnitHasOneWorker) {
  for (const int senders : {1, 3, 39}) {
    for (const int tokens : {0, 1, 2, 6, 7, 52, 128, 1000, 4096}) {
      const auto share = cuda::SendPartition::of(tokens, senders);
      EXPECT_EQ(share.unit_begin(0), 0);
      EXPECT_EQ(share.unit_begin(share.workers), tokens << share.splits);
      for (int token = 0; token < tokens; ++token) {
        const int worker = share.last_worker(token);
        EXPECT_LE(share.token_begin(worker), token) << tokens << " tokens, " << senders << " senders";
        if (worker + 1 < share.workers) {
          EXPECT_GT(share.token_begin(worker + 1), token);
        }
      }
    }
  }
}

TEST(SendPartition, WorkersOfATokenAreThoseWithUnitsOfIt) {
  for (const int senders : {1, 3, 39}) {
    for (const int tokens : {0, 1, 2, 6, 7, 52, 128, 1000}) {
      const auto share = cuda::SendPartition::of(tokens, senders);
      for (int worker = 0; worker < share.workers; ++worker) {
        const int begin = share.unit_begin(worker), end = share.unit_begin(worker + 1);
        const int wanted = begin == end ? 0 : ((end - 1) >> share.splits) - (begin >> share.splits) + 1;
        EXPECT_EQ(share.token_end(worker) - share.token_begin(worker), wanted)
            << tokens << " tokens, " << senders << " senders, worker " << worker;
        // Those that share rows have one unit: what send_units goes by.
        if (share.splits > 0) {
          EXPECT_LE(end - begin, 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry
