// The backend `collective` over engines, on ranks of one host: a rank leaves, throws or is killed, and its
// peers learn of it long before their deadline. What it has done before it left still counts.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "collective/engine_ranks.hpp"
#include "collective/pair_engine.hpp"
#include "ferry/ferry.hpp"
#include "harness/socket_engine.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

constexpr int kHidden = 64, kTokens = 8;
constexpr double kDeadline = 30, kSoon = 1;

Config config_of(int ranks) {
  return {.experts = ranks,
          .top_k = 1,
          .hidden = kHidden,
          .max_tokens = kTokens,
          .backend = BackendKind::collective,
          .format = Format::fp32(),
          .combine_type = DType::fp32,
          .deadline = kDeadline};
}

enum class Form { fused, phases };

// All tokens go to rank `to`; -1: token i goes to rank i % R.
void dispatch(Exchange& exchange, int to = -1, Form form = Form::fused) {
  const int ranks = exchange.rank().size();
  const std::vector<float> tokens(kTokens * kHidden, static_cast<float>(exchange.rank().index()));
  std::vector<std::int32_t> ids;
  for (int token = 0; token < kTokens; ++token) ids.push_back(to < 0 ? token % ranks : to);
  const Tokens given = Tokens::rows(tokens.data(), kTokens, DType::fp32);
  if (form == Form::fused) {
    exchange.dispatch(given, ids.data());
    return;
  }
  exchange.dispatch_send(given, ids.data());
  exchange.dispatch_receive();
}

// A call that rank 1 does not make.
void expect_loss_of_rank_1(const Rank& rank, const std::function<void()>& call) {
  const Stopwatch watch;
  try {
    call();
  } catch (const PeerLostError& error) {
    const std::string text = error.what();
    FERRY_CHECK(watch.own_seconds() < kSoon, std::to_string(watch.own_seconds()) + " s: " + text);
    FERRY_CHECK(error.record.peer == 1 && error.record.rank == rank.index(), text);
    FERRY_CHECK(error.record.operation == Operation::dispatch && error.record.call == 3, text);
    FERRY_CHECK(text.find("rank 1") != std::string::npos && text.find("dispatch 3") != std::string::npos,
                text);
    return;
  }
  FERRY_CHECK(false, "a call without rank 1 has ended well");
}

// Two calls of three ranks, and a third one that rank 1 does not make: it leaves instead.
void leave_before_the_third_call(const EngineOfRank& functions, Form form) {
  expect_none(run_ranks(3, functions, [&](const Rank& rank) {
    Exchange exchange(rank, config_of(3));
    for (int call = 0; call < 2; ++call) dispatch(exchange, -1, form);
    if (rank.index() == 1) return;
    expect_loss_of_rank_1(rank, [&] { dispatch(exchange, -1, form); });
  }));
}

TEST(EngineDepartures, ARankThatHasLeftIsLostAtOnce) {
  for (const Form form : {Form::fused, Form::phases}) {
    for (const bool ordered : {false, true}) {
      const ThreadEngine engine(3, ordered);
      leave_before_the_third_call([&](int rank) { return engine.functions(rank); }, form);
    }
    const PairEngine engine(3);
    leave_before_the_third_call([&](int rank) { return engine.functions(rank); }, form);
  }
}

// It stays in the group. NCCL's communicators are in that state while the destructor waits for the peers.
TEST(EngineDepartures, ARankThatHasDestroyedItsExchangeIsLostAtOnce) {
  const ThreadEngine engine(3);
  std::atomic<int> ended = 0;
  expect_none(run_ranks(
      3, [&](int rank) { return engine.functions(rank); },
      [&](const Rank& rank) {
        auto exchange = std::make_unique<Exchange>(rank, config_of(3));
        for (int call = 0; call < 2; ++call) dispatch(*exchange);
        if (rank.index() == 1) {
          exchange = nullptr;
          while (ended < 2) sleep_seconds(0.001);
          return;
        }
        expect_loss_of_rank_1(rank, [&] { dispatch(*exchange); });
        ++ended;
      }));
}

// Rank 1 gives its part of the last call, in which rank 2 is late with messages for rank 0, and leaves. Rank
// 3 then asks for one more call, which fails the group.
void leave_after_the_last_call(bool one_asks_for_more) {
  const PairEngine engine(4);
  const auto late = [&](int rank) {
    EngineFunctions functions = engine.functions(rank);
    if (rank != 2) return functions;
    functions.all_to_all_v =
        [all_to_all_v = functions.all_to_all_v, transfers = 0](
            int lane, const void* send, const std::int64_t* send_bytes, const std::int64_t* send_offsets,
            void* receive, const std::int64_t* receive_bytes, const std::int64_t* receive_offsets) mutable {
          if (transfers++ == 3) sleep_seconds(0.7);  // blocks, messages, blocks, messages
          all_to_all_v(lane, send, send_bytes, send_offsets, receive, receive_bytes, receive_offsets);
        };
    return functions;
  };
  expect_none(run_ranks(4, late, [&](const Rank& rank) {
    Exchange exchange(rank, config_of(4));
    for (int call = 0; call < 2; ++call) dispatch(exchange, 0);
    if (rank.index() == 3 && one_asks_for_more) expect_loss_of_rank_1(rank, [&] { dispatch(exchange, 0); });
  }));
}

TEST(EngineDepartures, ARankThatHasDoneItsPartMayLeave) {
  leave_after_the_last_call(false);
  leave_after_the_last_call(true);
}

#ifndef __SANITIZE_THREAD__  // which does not allow threads in forked processes

// Ranks are processes, each of which keeps the ends of all ranks open: the engine does not notice a death.
void lose_in_processes(const std::function<void()>& end_of_rank_1, int expected_status) {
  constexpr int kRanks = 3;
  const TestBootstrap meeting(kRanks);
  SocketEngine engine(kRanks);
  // Forked by this thread alone: a lock that another one holds would be held for ever in the new process,
  // such as those of the address sanitizer's allocator.
  std::vector<pid_t> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    processes.push_back(start_process([&, rank] {
      Group::custom(meeting.bootstrap(rank), engine.functions(rank)).run([&](const Rank& member) {
        Exchange exchange(member, config_of(kRanks));
        for (int call = 0; call < 2; ++call) dispatch(exchange);
        member.barrier();  // no rank is still in its second call, which a death would end too
        if (rank == 1) return end_of_rank_1();
        expect_loss_of_rank_1(member, [&] { dispatch(exchange); });
      });
    }));
  }
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(status_of_process(processes[static_cast<std::size_t>(rank)]), rank == 1 ? expected_status : 0);
}

TEST(EngineDepartures, ProcessesLearnOfARankThatLeavesOrIsKilled) {
  lose_in_processes([] {}, 0);
  lose_in_processes([] { raise(SIGKILL); }, SIGKILL);
}

#endif

}  // namespace
}  // namespace ferry::test
