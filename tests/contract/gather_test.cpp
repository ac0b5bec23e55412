// all_gather_v and reduce_scatter_v: rows of all ranks without routing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "oracle/gather.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {
namespace {

constexpr std::byte kUntouched{0xA5};

TestCase gather_case(TestCase c, int ranks) {
  c.ranks = ranks;
  c.config.hidden = 48;
  c.config.max_tokens = 4;  // so that calls of more rows take several rounds
  return c;
}

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

oracle::Bytes random_bytes(std::uint64_t seed, std::int64_t bytes) {
  Random random(seed);
  oracle::Bytes made(static_cast<std::size_t>(bytes));
  for (std::byte& each : made) each = static_cast<std::byte>(random.below(256));
  return made;
}

// Numbers of different magnitudes, so that another order of additions gives other bits.
oracle::Bytes random_rows(std::uint64_t seed, DType type, std::int64_t values) {
  Random random(seed);
  oracle::Bytes made(static_cast<std::size_t>(values * bytes_of(type)));
  for (std::int64_t i = 0; i < values; ++i) {
    const float part = static_cast<float>(random.below(2001) - 1000) / 1000;
    const float value = std::ldexp(part, static_cast<int>(random.below(20)) - 10);
    oracle::store(type, value, made.data() + i * bytes_of(type));
  }
  return made;
}

void require_bytes(const GuardedBuffer& got, const oracle::Bytes& expected, const char* what) {
  require(expected.empty() || std::memcmp(got.data(), expected.data(), expected.size()) == 0,
          str(what, ": other bytes than expected"));
  got.require_guards(what);
}

void check_gather(SyncExchange& exchange, const std::vector<std::int64_t>& counts, std::int64_t row_bytes,
                  std::uint64_t seed) {
  std::vector<oracle::Bytes> rows;
  for (std::size_t r = 0; r < counts.size(); ++r)
    rows.push_back(random_bytes(seed + r, counts[r] * row_bytes));
  const auto me = static_cast<std::size_t>(exchange.rank().index());
  const std::int64_t room = sum_of(counts) + 2;  // rows past the sum stay as they are
  GuardedBuffer got(room * row_bytes);
  std::memset(got.data(), static_cast<int>(kUntouched), static_cast<std::size_t>(room * row_bytes));
  const GuardedBuffer mine = GuardedBuffer::of(rows[me]);
  exchange.all_gather_v(counts[me] == 0 ? nullptr : mine.data(), counts[me], row_bytes, got.data(), room);
  oracle::Bytes expected = oracle::gathered(rows);
  expected.resize(static_cast<std::size_t>(room * row_bytes), kUntouched);
  require_bytes(got, expected, "gathered rows");
}

void check_scatter(SyncExchange& exchange, const std::vector<std::int64_t>& counts, DType type,
                   std::uint64_t seed) {
  const std::int64_t columns = exchange.config().hidden, total = sum_of(counts);
  std::vector<oracle::Bytes> rows;
  for (std::size_t r = 0; r < counts.size(); ++r)
    rows.push_back(random_rows(seed + r, type, total * columns));
  const auto me = static_cast<std::size_t>(exchange.rank().index());
  GuardedBuffer got(counts[me] * columns * bytes_of(type));
  const GuardedBuffer mine = GuardedBuffer::of(rows[me]);
  exchange.reduce_scatter_v(total == 0 ? nullptr : mine.data(), total, type,
                            counts[me] == 0 ? nullptr : got.data(), counts[me]);
  const std::int64_t first =
      std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(me), std::int64_t{0});
  require_bytes(got, oracle::scattered_sums(rows, type, columns, first, counts[me]), "scattered sums");
}

// Both operations, with the arrays that each rank passes in one block of memory.
void check_in_place(SyncExchange& exchange, const std::vector<std::int64_t>& counts, std::uint64_t seed) {
  const auto me = static_cast<std::size_t>(exchange.rank().index());
  const std::int64_t columns = exchange.config().hidden, row = columns * 2, total = sum_of(counts);
  const std::int64_t first =
      std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(me), std::int64_t{0});
  std::vector<oracle::Bytes> mine, whole;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    mine.push_back(random_bytes(seed + r, counts[r] * row));
    whole.push_back(random_rows(seed + 100 + r, DType::bf16, total * columns));
  }
  GuardedBuffer gathered((total + 2) * row);
  std::memset(gathered.data(), static_cast<int>(kUntouched), static_cast<std::size_t>(gathered.bytes()));
  std::copy(mine[me].begin(), mine[me].end(), gathered.data() + first * row);
  exchange.all_gather_v(gathered.data() + first * row, counts[me], row, gathered.data(), total + 2);
  oracle::Bytes expected = oracle::gathered(mine);
  expected.resize(static_cast<std::size_t>(gathered.bytes()), kUntouched);
  require_bytes(gathered, expected, "rows gathered in place");

  GuardedBuffer rows = GuardedBuffer::of(whole[me]);
  exchange.reduce_scatter_v(rows.data(), total, DType::bf16, rows.data() + first * row, counts[me]);
  expected = whole[me];
  const oracle::Bytes sums = oracle::scattered_sums(whole, DType::bf16, columns, first, counts[me]);
  std::copy(sums.begin(), sums.end(), expected.begin() + first * row);
  require_bytes(rows, expected, "rows with sums in place");
}

void check_both(SyncExchange& exchange, const std::vector<std::int64_t>& counts, std::uint64_t seed) {
  check_gather(exchange, counts, 96, seed);
  check_gather(exchange, counts, 3, seed);
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32})
    check_scatter(exchange, counts, type, seed);
}

// Every rank ends the call with a UsageError that holds `words`, and `memory` is as before.
void require_refused_whole(const std::string& words, GuardedBuffer& memory, std::int64_t bytes,
                           const std::function<void()>& call) {
  std::memset(memory.data(), static_cast<int>(kUntouched), static_cast<std::size_t>(bytes));
  try {
    call();
  } catch (const UsageError& error) {
    require(std::string(error.what()).find(words) != std::string::npos,
            str("'", error.what(), "' does not name '", words, "'"));
    const auto* first = static_cast<const std::byte*>(memory.data());
    require(std::all_of(first, first + bytes, [](std::byte b) { return b == kUntouched; }),
            "a refused call has written");
    return;
  }
  require(false, str("no error that names '", words, "'"));
}

TEST_P(Contract, GatheredAndScatteredRows) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "not in two hops on device memory yet";
  const TestCase c = gather_case(small_case(1), 4);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    check_both(exchange, {3, 0, 5, 1}, 1);
    check_both(exchange, {0, 0, 0, 0}, 2);
    check_both(exchange, {0, 0, 0, 40}, 3);
    const WireCounts wire = exchange.wire_counts();
    require_equal(wire.dispatch_bytes + wire.combine_bytes, std::int64_t{0}, "wire bytes");
  });
}

// A gather is one call of its lane, however many rounds it takes: a dispatch knows its number, by which the
// host waits for its total.
TEST_P(Contract, DispatchesAfterGathersOfSeveralRounds) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "not in two hops on device memory yet";
  const TestCase c = gather_case(small_case(2), 3);
  const StepInputs step = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    dispatch_and_combine(exchange, c, step, outputs);
    check_both(exchange, {40, 0, 3}, 1);
    dispatch_and_combine(exchange, c, step, outputs);  // compares the call's number with that of its total
    check_gather(exchange, {0, 90, 1}, 96, 2);
    dispatch_and_combine(exchange, c, step, outputs);
  });
}

TEST_P(Contract, GatheredAndScatteredRowsOfRandomCounts) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "not in two hops on device memory yet";
  for (const int ranks : {1, 2, 3, 8}) {
    const TestCase c = gather_case(small_case(static_cast<std::uint64_t>(ranks)), ranks);
    run(ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      Random random(c.seed);
      for (std::uint64_t call = 0; call < 4; ++call) {
        std::vector<std::int64_t> counts;
        for (int r = 0; r < ranks; ++r) counts.push_back(random.chance(0.3) ? 0 : random.below(12));
        check_both(exchange, counts, 100 * call);
      }
    });
  }
}

// Rows at their own place in `gathered`, and sums at theirs in `rows`.
TEST_P(Contract, RowsMayLieAtTheirOwnPlace) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "not in two hops on device memory yet";
  for (const int ranks : {1, 2, 3, 8}) {
    const TestCase c = gather_case(small_case(static_cast<std::uint64_t>(20 + ranks)), ranks);
    run(ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      Random random(c.seed);
      for (std::uint64_t call = 0; call < 6; ++call) {
        std::vector<std::int64_t> counts;
        for (int r = 0; r < ranks; ++r)
          counts.push_back(random.chance(0.2) ? 0 : random.below(call % 2 == 0 ? 6 : 40));
        check_in_place(exchange, counts, call);
      }
    });
  }
}

// Rows one row or one byte beside that place are refused, with nothing written.
TEST_P(Contract, RowsAtAnotherPlaceAreRefused) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "not in two hops on device memory yet";
  const TestCase c = gather_case(small_case(29), 3);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const bool odd = rank.index() == 1;
    const std::int64_t row = 2 * c.config.hidden, own = 2 * rank.index();
    GuardedBuffer all(10 * row);
    std::byte* const gathered = all.data() + 2 * row;
    const auto refused = [&](const std::string& words, const std::function<void()>& call) {
      require_refused_whole(words, all, all.bytes(), call);
      check_in_place(exchange, {2, 2, 2}, 5);
    };
    const auto gather = [&](const std::byte* mine) { exchange.all_gather_v(mine, 2, row, gathered, 6); };
    const auto scatter = [&](std::byte* sums) {
      exchange.reduce_scatter_v(gathered, 6, DType::bf16, sums, 2);
    };
    for (const std::int64_t place : {0, 1, 3, 4}) {
      std::byte* const mine = gathered + (odd ? place : own) * row;
      refused(str("rows of rank 1 lie at row ", place, " of its gathered"), [&] { gather(mine); });
      refused(str("sums of rank 1 lie at row ", place, " of its rows"), [&] { scatter(mine); });
    }
    for (const std::int64_t bytes : {-2 * row + 2, -row, 2 * row + 2, 6 * row - 2}) {
      std::byte* const mine = gathered + (odd ? bytes : own * row);
      refused("gathered (", [&] { gather(mine); });
      refused("sums (", [&] { scatter(mine); });
    }
  });
}

TEST_P(Contract, RefusedGathersWriteNothing) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "not in two hops on device memory yet";
  const TestCase c = gather_case(small_case(3), 3);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const bool odd = rank.index() == 1;
    const std::int64_t bytes = 6 * 2 * c.config.hidden;
    const GuardedBuffer rows = GuardedBuffer::of(random_bytes(7, bytes));
    GuardedBuffer out(bytes);
    const auto gather = [&](const void* from, std::int64_t count, std::int64_t row_bytes, void* to,
                            std::int64_t room) { exchange.all_gather_v(from, count, row_bytes, to, room); };
    const auto refused = [&](const char* words, const std::function<void()>& call) {
      require_refused_whole(words, out, bytes, call);
      check_both(exchange, {1, 2, 3}, 5);  // the exchange stays usable
    };
    refused("room for 5 rows on rank 1, but all ranks together have 6",
            [&] { gather(rows.data(), 2, 16, out.data(), odd ? 5 : 6); });
    refused("row_bytes", [&] { gather(rows.data(), 2, odd ? 8 : 16, out.data(), 6); });
    refused("row_bytes = 0 on rank 1", [&] { gather(rows.data(), 2, odd ? 0 : 16, out.data(), 6); });
    refused("count = -1 on rank 1", [&] { gather(rows.data(), odd ? -1 : 2, 16, out.data(), 6); });
    refused("rows is null for the 2 rows of rank 1",
            [&] { gather(odd ? nullptr : rows.data(), 2, 16, out.data(), 6); });
    refused("gathered is null", [&] { gather(rows.data(), 2, 16, odd ? nullptr : out.data(), 6); });
    const auto scatter = [&](const void* from, std::int64_t total, DType type, void* to, std::int64_t count) {
      exchange.reduce_scatter_v(from, total, type, to, count);
    };
    refused("rank 1 passes 5 rows, but the ranks' counts add up to 6",
            [&] { scatter(rows.data(), odd ? 5 : 6, DType::bf16, out.data(), 2); });
    refused("type", [&] { scatter(rows.data(), 6, odd ? DType::fp16 : DType::bf16, out.data(), 2); });
    refused("count = -1 on rank 1", [&] { scatter(rows.data(), 6, DType::bf16, out.data(), odd ? -1 : 2); });
    refused("rows is null for the 6 rows of rank 1",
            [&] { scatter(odd ? nullptr : rows.data(), 6, DType::bf16, out.data(), 2); });
    refused("sums is null", [&] { scatter(rows.data(), 6, DType::bf16, odd ? nullptr : out.data(), 2); });
  });
}

}  // namespace
}  // namespace ferry::contract
