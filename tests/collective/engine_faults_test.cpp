// The backend `collective` on engines that break their contract: they return early, or call Ferry.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective/engine_ranks.hpp"
#include "collective/pair_engine.hpp"
#include "ferry/ferry.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/support.hpp"
#include "seed.hpp"

namespace ferry::test {
namespace {

constexpr int kRanks = 2, kHidden = 64, kTokens = 8;

Config config_of() {
  return {.experts = kRanks,
          .top_k = kRanks,
          .hidden = kHidden,
          .max_tokens = kTokens,
          .backend = BackendKind::collective,
          .format = Format::fp32(),
          .combine_type = DType::fp32,
          .deadline = 5};
}

// Every token goes to every rank.
void dispatch(Exchange& exchange) {
  const std::vector<float> tokens(kTokens * kHidden, 1);
  std::vector<std::int32_t> ids;
  for (int i = 0; i < kTokens * kRanks; ++i) ids.push_back(i % kRanks);
  exchange.dispatch(Tokens::rows(tokens.data(), kTokens, DType::fp32), ids.data());
}

// The error that `body` throws on each rank. A rank's functions are those of a ThreadEngine, edited by
// `change`.
std::vector<std::string> errors_of(const std::function<void(int, EngineFunctions&)>& change,
                                   const std::function<void(Exchange&)>& body) {
  const ThreadEngine engine(kRanks);
  const auto changed = [&](int rank) {
    EngineFunctions functions = engine.functions(rank);
    change(rank, functions);
    return functions;
  };
  return run_ranks(kRanks, changed, [&](const Rank& rank) {
    Exchange exchange(rank, config_of());
    body(exchange);
  });
}

// In transfer `number`, counted from 0, no rank receives the last `missing` bytes of each peer.
std::vector<std::string> errors_of_short_transfer(int number, std::int64_t missing) {
  const auto cut = [=](int, EngineFunctions& functions) {
    functions.all_to_all_v =
        [=, all_to_all_v = functions.all_to_all_v, count = 0](
            int lane, const void* send, const std::int64_t* send_bytes, const std::int64_t* send_offsets,
            void* receive, const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) mutable {
          std::vector<std::int64_t> sent(send_bytes, send_bytes + kRanks);
          std::vector<std::int64_t> received(receive_bytes, receive_bytes + kRanks);
          if (count++ == number) {
            for (auto* list : {&sent, &received}) {
              for (std::int64_t& bytes : *list) bytes = std::max<std::int64_t>(0, bytes - missing);
            }
          }
          all_to_all_v(lane, send, sent.data(), send_offsets, receive, received.data(), receive_offsets);
        };
  };
  return errors_of(cut, [](Exchange& exchange) {
    for (int i = 0; i < 4; ++i) dispatch(exchange);
  });
}

// Transfers 0 and 2 carry blocks, 1 and 3 messages. In those of the second call, what the first has left
// could be taken for data.
TEST(EngineFaults, ATransferThatReturnsEarlyIsNoticed) {
  constexpr std::int64_t kAll = 1 << 30;
  for (const auto& [number, missing] : std::vector<std::pair<int, std::int64_t>>{
           {0, kAll}, {2, kAll}, {1, kAll}, {3, kAll}, {0, 8}, {2, 8}, {1, 8}, {3, 8}}) {
    for (const std::string& error : errors_of_short_transfer(number, missing)) {
      EXPECT_NE(error.find("all_to_all_v returned before the bytes of rank"), std::string::npos)
          << number << ": " << error;
    }
  }
  for (const std::string& error : errors_of_short_transfer(100, kAll)) EXPECT_EQ(error, "");
}

// How a rank's calls ended.
struct Ending {
  std::optional<WaitRecord> record;  // of a PeerLostError
  std::string text;
  double seconds = 0;  // of the last call
};

// What an engine does wrong with what rank 1 receives in one transfer.
using Damage = std::function<void(std::byte* receive, std::int64_t bytes)>;

// Makes two calls on three ranks. The second call's exchange of blocks returns on rank 1 without having
// sent and received (`early`), or with damaged bytes.
std::vector<Ending> endings_of_damaged_blocks(bool ordered, bool early, const Damage& damage) {
  constexpr int kThree = 3, kDamagedRank = 1, kFrom = 2;
  const TestBootstrap meeting(kThree);
  const PairEngine engine(kThree);
  std::vector<Ending> endings(kThree);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThree; ++rank) {
    threads.emplace_back([&, rank] {
      EngineFunctions functions = engine.functions(rank);
      functions.ordered_lanes = ordered;
      functions.all_to_all_v =
          [&, rank, all_to_all_v = functions.all_to_all_v, transfers = 0](
              int lane, const void* send, const std::int64_t* send_bytes, const std::int64_t* send_offsets,
              void* receive, const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) mutable {
            const bool damaged = rank == kDamagedRank && transfers++ == 2;  // blocks, messages, blocks
            const std::vector<std::int64_t> nothing(kThree, 0);
            all_to_all_v(lane, send, damaged && early ? nothing.data() : send_bytes, send_offsets, receive,
                         damaged && early ? nothing.data() : receive_bytes, receive_offsets);
            if (damaged && damage)
              damage(static_cast<std::byte*>(receive) + receive_offsets[kFrom], receive_bytes[kFrom]);
          };
      Ending& mine = endings[static_cast<std::size_t>(rank)];
      try {
        Group::custom(meeting.bootstrap(rank), functions).run([&](const Rank& member) {
          Config config = config_of();
          config.experts = config.top_k = kThree;
          config.deadline = 20;
          Exchange exchange(member, config);
          std::vector<float> rows(kThree * kTokens * kHidden, 0), tokens(kTokens * kHidden, 1);
          std::vector<std::int32_t> ids;
          for (int i = 0; i < kTokens * kThree; ++i) ids.push_back(i % kThree);
          const Tokens given = Tokens::rows(tokens.data(), kTokens, DType::fp32);
          exchange.dispatch(given, ids.data(), nullptr, {.memory = {.parts = {rows.data()}}});
          std::fill(rows.begin(), rows.end(), -7.0f);
          const Stopwatch watch;
          try {
            exchange.dispatch(given, ids.data(), nullptr, {.memory = {.parts = {rows.data()}}});
            mine.text = "no error";
          } catch (const PeerLostError& error) {
            mine = {.record = error.record, .text = error.what(), .seconds = watch.own_seconds()};
          }
          for (const float value : rows) FERRY_CHECK(value == -7, "rows were written");
        });
      } catch (const std::exception& error) {
        mine.text += std::string("; outside: ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return endings;
}

// All ranks end soon, name the rank and say what its engine did; no rows have been written.
void expect_blame(const std::vector<Ending>& endings, const std::string& fault) {
  for (const Ending& each : endings) {
    ASSERT_TRUE(each.record.has_value()) << each.text;
    EXPECT_EQ(each.record->peer, 1) << each.text;
    EXPECT_EQ(each.record->operation, Operation::dispatch) << each.text;
    EXPECT_EQ(each.record->call, 2) << each.text;
    EXPECT_NE(each.text.find("the engine of rank 1 failed in dispatch 2"), std::string::npos) << each.text;
    EXPECT_NE(each.text.find(fault), std::string::npos) << each.text;
    EXPECT_EQ(each.text.find("outside"), std::string::npos) << each.text;
    EXPECT_LT(each.seconds, 1) << each.text;
  }
}

TEST(EngineFaults, BlocksThatAreShortOnOneRankEndTheCallEverywhere) {
  const std::string shorter = "all_to_all_v returned before the bytes of rank ";
  for (const bool ordered : {false, true}) {
    expect_blame(endings_of_damaged_blocks(ordered, true, nullptr), shorter + "0 had arrived: its block of");
    const auto cut = [](std::byte* receive, std::int64_t bytes) {
      std::fill_n(receive + bytes - 8, 8, std::byte{});
    };
    expect_blame(endings_of_damaged_blocks(ordered, false, cut), shorter + "2 had arrived: its block of");
  }
}

TEST(EngineFaults, AGarbageBlockIsBlamedOnTheEngine) {
  Random random(seed());
  const auto garbage = [&](std::byte* receive, std::int64_t bytes) {
    std::generate_n(receive, bytes, [&] { return static_cast<std::byte>(random()); });
  };
  const auto bit = [&](std::byte* receive, std::int64_t) { receive[below(random, 64)] ^= std::byte{16}; };
  for (const bool ordered : {false, true}) {
    for (const Damage& damage : {Damage(garbage), Damage(bit)})
      expect_blame(endings_of_damaged_blocks(ordered, false, damage),
                   "all_to_all_v returned other bytes than rank 2 has sent: its block of");
  }
}

// A byte that one rank receives differently from what was sent: `back` bytes before the end of what comes
// from rank `from` in the rank's transfer number `transfer`.
struct DamagedByte {
  int rank, from, transfer;
  std::uint64_t back;
  std::byte change;
};

// A dispatch and a combine in two hops. Returns what each rank threw; `results` [R] gets the combined rows.
std::vector<std::string> errors_of_two_hops(const std::optional<DamagedByte>& damage,
                                            std::vector<std::vector<float>>& results) {
  constexpr int kFour = 4;
  const PairEngine engine(kFour);
  const auto functions = [&](int rank) {
    EngineFunctions changed = engine.functions(rank);
    changed.all_to_all_v = [damage, rank, all_to_all_v = changed.all_to_all_v, transfers = 0](
                               int lane, const void* send, const std::int64_t* send_bytes,
                               const std::int64_t* send_offsets, void* receive,
                               const std::int64_t* receive_bytes,
                               const std::int64_t* receive_offsets) mutable {
      all_to_all_v(lane, send, send_bytes, send_offsets, receive, receive_bytes, receive_offsets);
      if (!damage || rank != damage->rank || transfers++ != damage->transfer) return;
      const std::int64_t bytes = receive_bytes[damage->from];
      if (bytes == 0) return;
      const auto back = static_cast<std::int64_t>(damage->back % static_cast<std::uint64_t>(bytes));
      static_cast<std::byte*>(receive)[receive_offsets[damage->from] + bytes - 1 - back] ^= damage->change;
    };
    return changed;
  };
  results.assign(kFour, std::vector<float>(kTokens * kHidden));
  const auto body = [&](const Rank& rank) {
    Config config = config_of();
    config.experts = kFour;
    config.top_k = 2;
    config.hops = Hops::two;
    config.deadline = 20;
    Exchange exchange(rank, config);
    const std::vector<float> tokens(kTokens * kHidden, static_cast<float>(1 + rank.index()));
    std::vector<std::int32_t> ids;
    for (int i = 0; i < kTokens * 2; ++i) ids.push_back((rank.index() + i + i / 2) % kFour);
    const DispatchResult rows =
        exchange.dispatch(Tokens::rows(tokens.data(), kTokens, DType::fp32), ids.data());
    exchange.combine({.data = rows.data, .type = DType::fp32}, rows.plan,
                     {.data = results[static_cast<std::size_t>(rank.index())].data(), .type = DType::fp32});
  };
  const auto body_or_abort = [&](const Rank& rank) {
    try {
      body(rank);
    } catch (...) {  // ranks of the other host would notice at their deadline only
      for (int each = 0; each < kFour; ++each) engine.functions(each).abort();
      throw;
    }
  };
  return run_ranks(kFour, functions, body_or_abort, {0, 0, 1, 1});
}

// The counts of both hops lie in blocks, transfers 0, 2, 4 and 6. A rank that gets a damaged block ends the
// call, unless nobody reads the byte. Damaged messages lead to wrong values at the most.
TEST(EngineFaults, NoDamagedCountOfTwoHopsIsBelieved) {
  std::vector<std::vector<float>> expected, results;
  for (const std::string& error : errors_of_two_hops(std::nullopt, expected)) ASSERT_EQ(error, "");
  Random random(seed());
  int noticed = 0;
  for (int trial = 0; trial < 400; ++trial) {
    DamagedByte damage{.rank = below(random, 4),
                       .from = below(random, 4),
                       .transfer = below(random, 8),
                       .back = random(),
                       .change = static_cast<std::byte>(1 + below(random, 255))};
    if (trial % 4 != 0) damage.back %= 128;  // the tables are at the end
    const std::vector<std::string> errors = errors_of_two_hops(damage, results);
    if (damage.transfer % 2 != 0) continue;
    const std::string& error = errors[static_cast<std::size_t>(damage.rank)];
    if (error.empty()) {
      EXPECT_EQ(results, expected) << "transfer " << damage.transfer << ", rank " << damage.rank;
      continue;
    }
    ++noticed;
    const std::string fault = "all_to_all_v returned other bytes than rank " + std::to_string(damage.from);
    EXPECT_NE(error.find(fault), std::string::npos) << "transfer " << damage.transfer << ": " << error;
  }
  EXPECT_GT(noticed, 50);
}

// From call 2 on the engine of rank 2 loses what it sends rank 0. The others go on to the next call, in which
// they wait for rank 0; but rank 0 knows whom it waits for.
TEST(EngineFaults, ATimeoutNamesTheRankThatAnEarlierCallWaitsFor) {
  constexpr int kThree = 3;
  for (const bool split : {false, true}) {
    const PairEngine engine(kThree);
    const auto losing = [&](int rank) {
      EngineFunctions functions = engine.functions(rank);
      if (rank != 2) return functions;
      functions.all_to_all_v =
          [all_to_all_v = functions.all_to_all_v, transfers = 0](
              int lane, const void* send, const std::int64_t* send_bytes, const std::int64_t* send_offsets,
              void* receive, const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) mutable {
            std::vector<std::int64_t> sent(send_bytes, send_bytes + kThree);
            if (transfers++ >= 3) sent[0] = 0;  // blocks, messages, blocks, messages
            all_to_all_v(lane, send, sent.data(), send_offsets, receive, receive_bytes, receive_offsets);
          };
      return functions;
    };
    std::vector<std::optional<WaitRecord>> records(kThree);
    const auto body = [&](const Rank& rank) {
      Config config = config_of();
      config.experts = config.top_k = kThree;
      config.deadline = 0.5;
      Exchange exchange(rank, config);
      const std::vector<float> tokens(kTokens * kHidden, 1);
      std::vector<std::int32_t> ids;
      for (int i = 0; i < kTokens * kThree; ++i) ids.push_back(i % kThree);
      const Tokens given = Tokens::rows(tokens.data(), kTokens, DType::fp32);
      const Stopwatch watch;
      try {
        for (int call = 0; call < 3; ++call) {
          if (split) exchange.dispatch_send(given, ids.data());
          split ? exchange.dispatch_receive() : exchange.dispatch(given, ids.data());
        }
      } catch (const TimeoutError& error) {
        records[static_cast<std::size_t>(rank.index())] = error.record;
      }
      EXPECT_LT(watch.seconds(), 1.5);
    };
    expect_none(run_ranks(kThree, losing, body));
    for (const std::optional<WaitRecord>& record : records) {
      ASSERT_TRUE(record.has_value());
      EXPECT_EQ(record->peer, 2) << "rank " << record->rank;
    }
  }
}

TEST(EngineFaults, AFunctionThatCallsFerryIsNamed) {
  std::vector<Exchange*> exchanges(kRanks);
  const auto call_back = [&](int rank, EngineFunctions& functions) {
    if (rank == 1) functions.all_to_all_v = [&](auto...) { dispatch(*exchanges[1]); };
  };
  const std::vector<std::string> errors = errors_of(call_back, [&](Exchange& exchange) {
    exchanges[exchange.rank().index()] = &exchange;
    dispatch(exchange);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 1 failed in dispatch 1"), std::string::npos) << error;
    EXPECT_NE(error.find("all_to_all_v called an operation of an exchange"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace ferry::test
