// The backend `collective` on engines that break their contract: they return early, or call Ferry.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/support.hpp"

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
  const TestBootstrap meeting(kRanks);
  const ThreadEngine engine(kRanks);
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        EngineFunctions functions = engine.functions(rank);
        change(rank, functions);
        Group::custom(meeting.bootstrap(rank), functions).run([&](const Rank& member) {
          Exchange exchange(member, config_of());
          body(exchange);
        });
      } catch (const PeerLostError& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
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
           {0, kAll}, {2, kAll}, {1, kAll}, {3, kAll}, {1, 8}, {3, 8}}) {
    for (const std::string& error : errors_of_short_transfer(number, missing)) {
      EXPECT_NE(error.find("all_to_all_v returned before the bytes of rank"), std::string::npos)
          << number << ": " << error;
    }
  }
  for (const std::string& error : errors_of_short_transfer(100, kAll)) EXPECT_EQ(error, "");
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
